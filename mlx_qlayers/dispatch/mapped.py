"""Operations inside of ``mx.vmap``: each is one node, which runs once for every item of the axis.

MLX builds a function's graph first and maps it after, primitive by primitive. Kernels and quantized
products have no rule, and a graph does not show that it will be mapped: ``mx.vmap`` is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import mlx.core as mx

from ..runtime.backend import Mode, mode, use_backend, within
from ..runtime.transformed import has_values, no_derivative
from .gradients import is_float, listed, replaced, with_frozen

Call = Callable[..., Any]
Axes = Sequence[int | None]
# Whether a call with such axes may be made once, with one more leading axis of arrays.
Batched = Callable[[Sequence[Any], Axes], bool]


def always(*_: Any) -> bool:
    """For an operation one call of which does for all, whatever the axes."""
    return True


class _Trace:
    """The nodes of a function that ``mx.vmap`` traces, by their number.

    Attributes:
        plain: those that the mapped arguments may not reach, by another trace: their results are
            computed, not zeros that the rule replaces.
        made: all others.
        reached: those that depend on what is mapped.
    """

    def __init__(self, plain: frozenset[int]) -> None:
        self.plain, self.made, self.reached = plain, set[int](), set[int]()
        self._count = 0

    def number(self) -> int:
        """That of the next node."""
        self._count += 1
        if self._count not in self.plain:
            self.made.add(self._count)
        return self._count


_trace: ContextVar[_Trace] = ContextVar("mlx_qlayers_vmap")


def wrap_vmap() -> None:
    """Have ``mx.vmap`` say to operations that they are inside of it."""
    stock: Any = mx.vmap
    if not hasattr(stock, "__wrapped__"):
        setattr(mx, "vmap", wraps(stock)(partial(_vmap, stock)))  # noqa: B010, mypy's reason


def _vmap(stock: Any, fun: Call, in_axes: Any = 0, out_axes: Any = 0) -> Call:
    @wraps(fun)
    def mapped(*args: Any) -> Any:
        plain = frozenset[int]()
        while True:
            trace = _Trace(plain)

            def traced(*held: Any, trace: _Trace = trace) -> Any:
                with within(_trace, trace), mode(Mode.MAPPED):
                    return fun(*held)

            found = stock(traced, in_axes, out_axes)(*args)
            left = trace.made - trace.reached
            if not left:
                return found
            plain |= left

    return mapped


def run_mapped(name: str, call: Call, batched: Batched | None, *arrays: Any) -> Any:
    """Make an operation's call inside of ``mx.vmap``; ``call`` is how it runs outside."""
    there = [i for i, a in enumerate(arrays) if a is not None]
    given, expanded = [arrays[i] for i in there], partial(replaced, [None] * len(arrays), there)

    def of(*some: mx.array) -> Any:
        return call(*expanded(some))

    if has_values(given):
        with mode(Mode.EAGER):
            return of(*given)

    def at_once(axes: Axes) -> bool:
        return batched is not None and batched(arrays, expanded(axes))

    with use_backend("reference"), mode(Mode.TRANSFORMED):
        like = of(*(mx.zeros(a.shape, a.dtype) for a in given))  # which nobody evaluates
    outputs = _differentiable(of, with_frozen(name, given), listed(like), at_once)
    return outputs if isinstance(like, (list, tuple)) else outputs[0]


def _differentiable(
    of: Call, given: list[mx.array], like: list[mx.array], at_once: Callable[[Axes], bool]
) -> list[mx.array]:
    """A node of a call, whose gradients are nodes of their own."""
    later, trace = list[list[mx.array]](), _trace.get()
    own = trace.number()

    def keep(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
        later[:] = [listed(primals), listed(cotangents)]
        return [mx.zeros_like(a) for a in later[0]]

    def gradient(i: int, cotangent: mx.array) -> mx.array:
        """That of one argument; it is asked for if it is needed, or outside of ``mx.vmap``."""
        if _trace.get(None) is not trace:
            return cotangent
        primals, cotangents = later

        def of_one(*some: mx.array) -> list[mx.array]:
            rest, up = list(some[: len(primals)]), list(some[len(primals) :])

            def alone(a: mx.array) -> list[mx.array]:
                return listed(of(*rest[:i], a, *rest[i + 1 :]))

            return mx.vjp(alone, [rest[i]], up)[1]

        # Where its arguments are mapped and nothing has reached it, the call's result is not used.
        numbers = {trace.number(): len(primals) + len(cotangents), own: len(primals)}
        rule = partial(_mapped, of_one, [primals[i]], lambda _: False, numbers)
        return _node(of_one, [*primals, *cotangents], [primals[i]], rule, no_derivative)[0]

    passed = list(given)
    for i in (i for i, a in enumerate(given) if is_float(a)):
        identity: Any = mx.custom_function(lambda a: a)
        identity.vjp(lambda _, dy, __, i=i: gradient(i, dy))
        passed[i] = identity(given[i])
    rule = partial(_mapped, of, like, at_once, {own: len(given)})
    return _node(of, passed, like, rule, keep)


def _node(
    of: Call, given: list[mx.array], like: list[mx.array], rule: partial[Any], vjp: Call
) -> list[mx.array]:
    """Arrays of these shapes, whose numbers come of the rule."""
    trace = _trace.get()

    def results(*arrays: mx.array) -> list[mx.array]:
        if next(iter(rule.args[-1])) in trace.plain:
            with mode(Mode.TRANSFORMED):
                return listed(of(*arrays))
        return [mx.zeros(y.shape, y.dtype) for y in like]

    node: Any = mx.custom_function(results)
    node.vmap(partial(rule, trace))
    node.vjp(vjp)
    node.jvp(no_derivative)
    return listed(node(*given))


def _mapped(
    of: Call,
    like: list[mx.array],
    at_once: Callable[[Axes], bool],
    numbers: dict[int, int],
    trace: _Trace,
    arrays: Any,
    axes: Any,
) -> tuple[list[mx.array], list[int]]:
    """The rule of a node: calls, whose results lie along the first axis.

    ``numbers`` are nodes, and how many of the arrays each depends on.
    """
    axes = axes if isinstance(axes, (list, tuple)) else [axes]  # of a single array: no list
    mapped = [axis is not None for axis in axes]
    trace.reached |= {number for number, count in numbers.items() if any(mapped[:count])}
    pairs = list(zip(listed(arrays), axes, strict=True))
    items = next(a.shape[axis] for a, axis in pairs if axis is not None)
    if not items:
        found = [mx.zeros((0, *y.shape), y.dtype) for y in like]
    elif at_once(axes):
        found = listed(of(*(a if i is None else mx.moveaxis(a, i, 0) for a, i in pairs)))
    else:
        each = [
            listed(of(*(a if i is None else mx.take(a, n, i) for a, i in pairs)))
            for n in range(items)
        ]
        found = [mx.stack(list(ys)) for ys in zip(*each, strict=True)]
    return found, [0] * len(found)
