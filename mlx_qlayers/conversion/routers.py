"""Recognises how experts were chosen, by what :mod:`.recorder` kept of it.

Numbers of logits, and a bias, are chosen from by ``mx.argpartition``; groups of them may be left
out before. The shares are taken of the scores at the chosen places, divided by their sum or not,
and scaled. In which order and by which functions the code says so does not matter.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import mlx.core as mx

from ..options import Router
from .matcher import Mismatch
from .recorder import SAME, Node, Recorder


class Recognised(NamedTuple):
    """How experts were chosen: the arguments of :func:`~mlx_qlayers.ops.experts.experts_chosen`."""

    logits: mx.array
    router: Router
    bias: mx.array | None
    factors: mx.array | None

    def __str__(self) -> str:
        router, count = self.router, self.logits.shape[-1]
        parts = [f"{router.top_k} of {count} experts by {router.score}"]
        parts[0] += " and bias" if self.bias is not None else ""
        if router.dropped:
            parts.append(f"in {router.groups - router.dropped} of {router.groups} groups")
        if router.normed:
            parts.append("shares of their sum")
        if router.scale != 1:
            parts.append(f"times {router.scale:g}")
        if self.factors is not None:
            parts.append("times a factor of each")
        return ", ".join(parts)


class _Differs(Exception):
    """What is not as in a router, and the line."""


def recognise_router(recorder: Recorder, indices: mx.array, shares: mx.array, line: str) -> Any:
    """How experts and their shares came about, which are used in a line, or a Mismatch."""
    try:
        return _Reader(recorder).read(indices, shares)
    except _Differs as stop:
        reason, at = stop.args
        return Mismatch(reason, at or line)


def plain(recorder: Recorder, array: Any) -> Any:
    """An array before casts and ``mx.stop_gradient``."""
    while (node := recorder.node(array)) and node.op in ("astype", "stop_gradient", SAME):
        array = node.args[0]
    return array


def argument(node: Node, position: int, name: str) -> Any:
    """An argument by position or name; None without it."""
    return node.args[position] if len(node.args) > position else node.options.get(name)


def axis_of(node: Node, position: int = 1) -> int:
    """The axis that a function was called with, from the last one on."""
    axis: int | None = argument(node, position, "axis")
    if axis is None:  # which of the others is all axes
        return -1 if node.op in ("argpartition", "topk") else 0
    return axis if axis < 0 else axis - int(node.args[0].ndim)


class _Reader:
    """Reads back from the shares and the experts to the logits."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def read(self, indices: mx.array, shares: mx.array) -> Recognised:
        """Raises where something is not as in a router."""
        joined = self.recorder.node(plain(self.recorder, indices))
        if joined is not None and joined.op == "concatenate":
            return self.sparsemixer(joined, shares)
        numbers, options = self.chosen_from(indices)
        source, more, factors = self.shares(indices, shares)
        ungrouped, groups = self.groups(numbers)
        options |= more | groups
        if more.get("score"):
            self.check(self.same(source, numbers), "softmax of others than the chosen", numbers)
            return Recognised(source, Router(**options, dtype=shares.dtype), None, factors)
        scores, bias = self.bias(ungrouped)
        options["masked"] = bool(groups.get("dropped")) and self.same(source, numbers)
        as_chosen = options["masked"] or self.same(source, scores)
        self.check(as_chosen, "shares of other numbers than those with the bias", source)
        node, score = self.made(scores, "sigmoid", "softmax", "sqrt"), None
        if node.op == "sqrt":
            node, score = self.made(node.args[0], "softplus"), "sqrtsoftplus"
        if node.op == "softmax":
            self.check(axis_of(node) == -1, "a softmax of another axis", node.y)
        options["score"] = score or node.op
        logits = plain(self.recorder, node.args[0])
        return Recognised(logits, Router(**options, dtype=shares.dtype), bias, factors)

    def sparsemixer(self, joined: Node, shares: mx.array) -> Recognised:
        """Experts and shares that are put together one by one."""
        numbers, indices = self.made(shares, "concatenate").args[0], joined.args[0]
        self.check(len(indices) == len(numbers), "other shares", shares)
        lefts = [self.of_last_axis(at, "argmax").args[0] for at in indices]
        for before, at, left in zip(lefts, indices, lefts[1:], strict=False):
            put = self.made(left, "put_along_axis")
            whole = axis_of(put, 3) == -1 and self.same(put.args[0], before)
            alike = whole and self.same(put.args[1], at) and self.number(put.args[2]) == -inf
            self.check(alike, "other logits left", left)
        far = set()
        for at, share, left in zip(indices, numbers, lefts, strict=True):
            taken = self.made(share, "take_along_axis")
            soft = self.made(taken.args[0], "softmax")
            band = self.made(soft.args[0], "where")
            alike = self.same(taken.args[1], at) and self.same(band.args[2], left)
            self.check(alike and band.args[1] == -inf, "another softmax", band.y)
            self.check(axis_of(soft) == -1 and axis_of(taken, 2) == -1, "another axis", soft.y)
            far.add(self.distance(band.args[0], lefts[0], left))
        self.check(len(far) == 1, "more than one distance", shares)
        count, dtype = len(numbers), shares.dtype
        router = Router(count, "sparsemixer", normed=False, epsilon=far.pop(), dtype=dtype)
        return Recognised(lefts[0], router, None, None)

    def distance(self, hidden: Any, logits: mx.array, left: mx.array) -> float:
        """How far below the largest, relative to the larger size, logits are hidden."""
        over = self.made(hidden, "gt")
        ratio = self.made(over.args[0], "truediv")
        apart, size = (
            self.made(a, op) for a, op in zip(ratio.args, ("sub", "maximum"), strict=True)
        )
        top, absolute = apart.args[0], self.made(size.args[0], "abs")
        self.check(self.same(self.of_last_axis(top, "max").args[0], left), "another top", top)
        alike = self.same(size.args[1], top) and self.same(apart.args[1], logits)
        self.check(alike and self.same(absolute.args[0], logits), "another distance", ratio.y)
        number: float = over.args[1]
        self.check(isinstance(number, int | float), "a distance of arrays", over.y)
        return number

    def number(self, array: Any) -> float:
        """The number that an array was made of."""
        return float(self.made(array, "array").args[0])

    def of_last_axis(self, array: Any, op: str) -> Node:
        """What gave the largest of the last axis, or its place."""
        node = self.made(array, op)
        keeps = argument(node, 2, "keepdims") and axis_of(node) == -1
        self.check(bool(keeps), "another axis", node.y)
        return node

    def chosen_from(self, indices: mx.array) -> tuple[mx.array, dict[str, Any]]:
        """What the largest were looked for in."""
        count, part, last = self.places(indices, -1)
        numbers = part.args[0]
        negated = (node := self.recorder.node(numbers)) is not None and node.op == "neg"
        self.check(negated != last, "the smallest", part.y)
        return (node.args[0] if node and negated else numbers), {"top_k": count, "last": last}

    def places(self, indices: Any, axis: int) -> tuple[int, Node, bool]:
        """How many places of ``mx.argpartition`` were taken, of what, and whether the last."""
        taken = self.made(indices, "getitem")
        part = self.made(taken.args[0], "argpartition")
        key, kth = taken.args[1], argument(part, 1, "kth")
        parts = key if isinstance(key, tuple) else (key,)
        # Along an earlier axis all of the later ones are taken.
        ahead, at, behind = parts[: axis + 1 or None][:-1], parts[axis], parts[axis:][1:]
        whole = ahead == (...,) and all(each == slice(None) for each in behind)
        is_slice = isinstance(at, slice) and at.step is None
        self.check(whole and is_slice, "other places", taken.y)
        self.check(axis_of(part, 2) == axis, "another axis", part.y)
        last = at.stop is None
        count = -at.start if last and at.start else at.stop
        agree = at.start is None or last
        agree = agree and isinstance(count, int) and kth == (-count if last else count - 1)
        self.check(agree, "other places than the largest", taken.y)
        return count, part, last

    def shares(
        self, indices: mx.array, shares: mx.array
    ) -> tuple[mx.array, dict[str, Any], mx.array | None]:
        """What the shares were taken of, how, and a factor of each expert."""
        options: dict[str, Any] = {"scale": 1.0, "normed": False}
        factors, array = None, shares
        while True:
            node = self.made(array, "mul", "truediv", "softmax", "take_along_axis")
            if node.op == "take_along_axis":
                whole = axis_of(node, 2) == -1 and self.same(node.args[1], indices)
                self.check(whole, "numbers of other experts", node.y)
                return node.args[0], options, factors
            self.check(not options["normed"], "more than a division by the sum", node.y)
            if node.op == "mul":
                array, by = node.args
                if isinstance(array, int | float):
                    array, by = by, array
                if isinstance(by, int | float):
                    options["scale"] *= by
                    continue
                of_each = self.made(by, "getitem")
                alone = factors is None and self.same(of_each.args[1], indices)
                factors = of_each.args[0]
                self.check(alone and factors.ndim == 1, "a product", node.y)
            elif node.op == "truediv":
                array, total = node.args
                options |= {"normed": True} | self.total(total, array)
            else:
                self.check(axis_of(node) == -1, "another axis", node.y)
                array = node.args[0]
                options |= {"normed": True, "score": "logits"}

    def total(self, total: Any, of: mx.array) -> dict[str, Any]:
        """What is added to a sum, and what it is at least."""
        options: dict[str, Any] = {}
        node = self.made(total, "sum", "add", "maximum")
        for op, name in (("maximum", "floor"), ("add", "epsilon")):
            if node.op == op:
                inner, options[name] = node.args
                self.check(isinstance(options[name], int | float), "a sum of arrays", node.y)
                node = self.made(inner, "sum", "add")
        self.of_rows(self.made(node.y, "sum"), of)
        return options

    def groups(self, numbers: mx.array) -> tuple[mx.array, dict[str, Any]]:
        """The numbers before groups of them were left out."""
        node = self.recorder.node(plain(self.recorder, numbers))
        if node is None or node.op not in ("flatten", "reshape"):
            return numbers, {}
        put = self.made(node.args[0], "put_along_axis")
        inside, dropped, fill = put.args[:3]
        self.check(axis_of(put, 3) == -2, "another axis", put.y)
        count, part, last = self.places(dropped, -2)
        self.check(not last, "the highest groups", part.y)
        rank = self.made(part.args[0], "sum", "max")
        if rank.op == "sum":
            top = self.made(rank.args[0], "topk")
            self.of_rows(rank, top.y)
            two = argument(top, 1, "k") == 2 and axis_of(top, 2) == -1
            self.check(two and self.same(top.args[0], inside), "other ranks of groups", top.y)
        else:
            self.of_rows(rank, inside)
        before = self.made(inside, "unflatten", "reshape").args[0]
        split = (*before.shape[:-1], inside.shape[-2], before.shape[-1] // inside.shape[-2])
        self.check(inside.shape == split, "other groups", inside)
        options = {"groups": split[-2], "dropped": count, "fill": self.number(fill)}
        return before, options | {"pairs": rank.op == "sum"} if count else {}

    def of_rows(self, node: Node, array: Any) -> None:
        """Raise unless a node is the sum or the largest of the last axis of an array."""
        keeps = argument(node, 2, "keepdims") and axis_of(node) == -1
        self.check(bool(keeps) and self.same(node.args[0], array), "another sum", node.y)

    def bias(self, numbers: mx.array) -> tuple[mx.array, mx.array | None]:
        """The scores, and the bias that was added to them."""
        node = self.recorder.node(plain(self.recorder, numbers))
        if node is None or node.op != "add":
            return numbers, None
        scores, bias = node.args
        while (made := self.recorder.node(bias)) and made.op in ("astype", "reshape"):
            bias = made.args[0]
        self.check(getattr(bias, "shape", None) == scores.shape[-1:], "another bias", node.y)
        return scores, bias

    def made(self, array: Any, *ops: str) -> Node:
        """What gave an array, before casts, which is one of these."""
        node = self.recorder.node(plain(self.recorder, array))
        if node is None or node.op not in ops:
            what = "an array from elsewhere" if node is None else node.op
            raise _Differs(
                f"{what} where a router has {' or '.join(ops)}", node.line if node else ""
            )
        return node

    def same(self, one: Any, other: Any) -> bool:
        """Whether two arrays are one, before casts."""
        return plain(self.recorder, one) is plain(self.recorder, other)

    def check(self, condition: bool, what: str, array: Any) -> None:
        """Raise unless it holds."""
        if not condition:
            node = self.recorder.node(array)
            raise _Differs(f"the router has {what}", node.line if node else "")
