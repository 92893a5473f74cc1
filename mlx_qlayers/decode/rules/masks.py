"""Reads from the masks of mlx-lm's code which rows of a cache a token sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from ..graph import Node, Size, number_of

_VIEWS = ("Broadcast", "ExpandDims", "Reshape", "Flatten", "Unflatten", "Squeeze", "AsType")
# Which of both sides of a comparison is the larger one, and by how much at least.
_COMPARED = {"GreaterEqual": (0, 0), "Greater": (0, 1), "LessEqual": (1, 0), "Less": (1, 1)}
# A sum: how often it has the number of the row, that of the token in the step, the padding of a
# sequence, 1 and positions.
_ROW, _TOKEN, _PADDING, _ONE = "row", "token", "padding", ""


class Shown(NamedTuple):
    """The rows that a token sees.

    Attributes:
        window: itself and those right behind it, so many; 0 for all.
        padded: without those ahead of each sequence of a batch.
        causal: without those of later tokens of the step, if it has several.
    """

    window: int = 0
    padded: bool = False
    causal: bool = False


def shown(
    mask: Node | None, row: Size, size: int, tokens: int, is_own: Callable[[str], bool]
) -> Shown | None:
    """Read a mask; None if it may show something else.

    Args:
        mask: none hides nothing.
        row: where the first token is written.
        size: of a ring that goes round, else 0.
        tokens: of the step.
        is_own: whether an input is one of the cache, by its name.
    """
    if mask is None:
        return Shown()
    at = Counter({_ONE: row.const, **dict(row.terms)})
    mask, rolled = _unrolled(seen_through(mask), row, size)
    if rolled or size:  # in the order of its tokens, of which this is the last
        at = Counter({_ONE: size - 1})
    parts = [_part(each, at, rolled, tokens, is_own) for each in _conditions(mask)]
    found = [each for each in parts if each is not None]
    if len(found) < len(parts):
        return None
    windows = [each.window for each in found if each.window]
    padded, causal = (any(each[i] for each in found) for i in (1, 2))
    return Shown(min(windows, default=0), padded, causal)


def _conditions(mask: Node) -> list[Node]:
    """The conditions that a mask combines by "and"."""
    mask = seen_through(mask)
    if mask.op != "LogicalAnd" and (mask.op, mask.arg) != ("BitwiseBinary", (0,)):
        return [mask]
    return [each for s in mask.src for each in _conditions(s)]


def _unrolled(mask: Node, row: Size, size: int) -> tuple[Node, bool]:
    """A mask in the order of tokens, and whether it was moved to that of a ring's rows."""
    items = [each.arg for each in mask.src if each.op == "Item"]
    if mask.op != "Concatenate" or items != [(1,), (0,)]:
        return mask, False
    split = mask.src[0].src[0]
    last = split.src[0].shape[-1] - 1 if size == 0 else size - 1
    at = Size(last - row.const, tuple((name, -n) for name, n in row.terms))
    fits = split.op == "Split" and split.arg[0] == (at,)
    return (seen_through(split.src[0]), True) if fits else (mask, False)


def _part(
    node: Node, at: Counter[str], rolled: bool, tokens: int, is_own: Callable[[str], bool]
) -> Shown | None:
    """The rows that one comparison shows."""
    if node.op not in _COMPARED:
        return None
    larger, more = _COMPARED[node.op]
    one, other = (_sum(s, tokens, is_own) for s in (node.src[larger], node.src[1 - larger]))
    if one is None or other is None:
        return None
    one.subtract(other)
    one[_ONE] -= more
    # A row is that of the token, less how many tokens came since.
    since = one.pop(_ROW, 0)
    one.update({name: since * count for name, count in at.items()})
    one[_TOKEN] += since * (tokens > 1)
    left = {name: count for name, count in one.items() if count}
    number = left.pop(_ONE, 0)
    if not left and abs(since) == 1:
        if tokens > 1 and since < 0:
            return Shown(causal=True) if number == 0 else None
        if since < 0 or number < 0:
            return Shown() if number >= 0 else None
        return Shown(number + 1)
    behind = {name: count for name, count in at.items() if count and name}
    if since == 1 and left == {**behind, _PADDING: -1} and number == at[_ONE] + rolled:
        return Shown(padded=True)
    return None


def _sum(node: Node, tokens: int, is_own: Callable[[str], bool]) -> Counter[str] | None:
    """The terms that a node adds up."""
    node = seen_through(node)
    if node.op == "Input":
        name = node.arg[0]
        return Counter({_PADDING: 1}) if name.endswith(".left_padding") and is_own(name) else None
    if node.op == "Arange" and node.arg[2] == 1:
        start, stop, _ = node.arg
        if start == 0 and stop != 1:
            return Counter({_ROW: 1})
        if _numbers(start, tokens) != _numbers(stop):
            return None
        first = _numbers(start)
        first[_TOKEN] += int(tokens > 1)
        return first
    if node.op in ("Add", "Subtract"):
        one, other = (_sum(s, tokens, is_own) for s in node.src)
        if one is not None and other is not None:
            (one.update if node.op == "Add" else one.subtract)(other)
            return one
    if node.op == "Numbers" and not node.shape:
        return _numbers(node.arg[0])
    return None if number_of(node) is None else _numbers(number_of(node))


def _numbers(value: Any, more: int = 0) -> Counter[str]:
    value = value if isinstance(value, Size) else Size(value, ())
    return Counter({_ONE: int(value.const) + more, **dict(value.terms)})


def seen_through(node: Node) -> Node:
    """The node that views reshape or cast."""
    while node.op in _VIEWS and (node.op, node.dtype) != ("AsType", mx.bool_):
        node = node.src[0]
    return node
