"""The gradient of an operation whose forward pass is a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import mlx.core as mx

from ..runtime.backend import Mode, mode, within
from ..runtime.devices import device_of
from ..runtime.transformed import no_derivative, without_derivative

# The arrays of a call; None where an optional one is left out.
Arrays = Sequence[mx.array | None]
Outputs = mx.array | list[mx.array]


class Gradient(NamedTuple):
    """How the gradients of the arrays at positions ``of`` are computed together.

    ``compute`` takes lists of arrays, cotangents and outputs.
    """

    of: tuple[int, ...]
    compute: Callable[[Arrays, list[mx.array], list[mx.array]], Sequence[mx.array]]


def gradient_of(composed: Callable[..., Outputs], arrays: Arrays) -> tuple[Gradient, ...]:
    """The gradients of all floating-point arguments, by autodiff of the same in MLX's operators."""
    floats = tuple(i for i, a in enumerate(arrays) if is_float(a))

    def compute(given: Arrays, cotangents: list[mx.array], _: list[mx.array]) -> Sequence[mx.array]:
        def of_floats(*some: mx.array) -> list[mx.array]:
            made = listed(composed(*replaced(given, floats, some)))
            # Further outputs of a launch have no gradient.
            return made + [mx.zeros_like(c) for c in cotangents[len(made) :]]

        primals = [cast(mx.array, given[i]) for i in floats]
        with mode(Mode.TRANSFORMED):
            return mx.vjp(of_floats, primals, cotangents)[1]

    return (Gradient(floats, compute),) if floats else ()


def differentiable(
    op: str, forward: Callable[..., Outputs], gradients: Sequence[Gradient], specs: Sequence[Any]
) -> Callable[..., Outputs]:
    """``forward`` with gradients; an argument without one raises, as in MLX's own operators.

    On ``host`` a launch computes at once, so only gradients that are asked for are computed; on a
    GPU everything is lazy and one node does for all.
    """
    there = [i for i, spec in enumerate(specs) if spec is not None]
    expanded = partial(replaced, [None] * len(specs), there)
    build = _at_once if device_of().launches_at_once else _lazy
    node = build(lambda given: forward(*expanded(given)), _at(gradients, there, expanded))
    return lambda *arrays: node(with_frozen(op, [arrays[i] for i in there]))


Compute = Callable[[list[mx.array], list[mx.array], list[mx.array]], Sequence[mx.array]]


def _at(
    gradients: Sequence[Gradient], there: list[int], expanded: Callable[..., Arrays]
) -> list[tuple[list[int], Compute]]:
    """The gradients by positions among the arrays that are there, in the mode that they run in."""

    def of(gradient: Gradient) -> Compute:
        def compute(
            given: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
        ) -> Sequence[mx.array]:
            # Launches read bytes, and a function of the caller's may give any dtype.
            pairs = zip(cotangents, outputs, strict=True)
            cotangents = [c if c.dtype == y.dtype else c.astype(y.dtype) for c, y in pairs]
            with mode(Mode.GRADIENT):
                return gradient.compute(expanded(given), cotangents, outputs)

        return compute

    return [([there.index(i) for i in g.of], of(g)) for g in gradients]


def _lazy(
    forward: Callable[[Sequence[mx.array]], Outputs], gradients: list[tuple[list[int], Compute]]
) -> Callable[[list[mx.array]], Outputs]:
    node: Any = mx.custom_function(lambda *given: forward(given))

    @node.vjp
    def _(given: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        arrays, made = listed(given), dict[int, mx.array]()
        for positions, compute in gradients:
            found = compute(arrays, listed(cotangents), listed(outputs))
            made |= zip(positions, found, strict=True)
        return [made[i] if i in made else mx.zeros_like(a) for i, a in enumerate(arrays)]

    return lambda given: cast(Outputs, node(*given))


# Functions that clear the arrays of gradients that were computed, in a block of :func:`forgetting`.
_clear: ContextVar[list[Callable[[], None]] | None] = ContextVar("clear", default=None)


@contextmanager
def forgetting() -> Iterator[None]:
    """Free what gradients in a ``with`` block are computed from, once their values are there.

    MLX frees it where it evaluates them, which it does not inside of another gradient.
    """
    calls = list[Callable[[], None]]()
    with within(_clear, calls):
        yield
    for call in calls:
        call()


def _at_once(
    forward: Callable[[Sequence[mx.array]], Outputs], gradients: list[tuple[list[int], Compute]]
) -> Callable[[list[mx.array]], Outputs]:
    """Every argument passes an identity first, whose gradient MLX asks for only if it needs it."""

    def run(arrays: list[mx.array]) -> Outputs:
        # The cotangents of the whole function; the identities' own come after them.
        given, made = list[list[mx.array]](), dict[Compute, Sequence[mx.array]]()
        if (calls := _clear.get()) is not None:
            calls += [given.clear, made.clear]
        node: Any = mx.custom_function(lambda *held: forward(held))
        node.jvp(no_derivative)  # else that of constants, which is zero

        @node.vjp
        def _(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
            held = listed(primals)
            given[:] = [held, listed(cotangents), listed(outputs)]
            return [mx.broadcast_to(mx.array(0, a.dtype), a.shape) for a in held]

        def gradient(compute: Compute, nth: int) -> mx.array:
            if compute not in made:
                arrays = [a for some in given for a in some]
                made[compute] = without_derivative(lambda: list(compute(*given)), arrays)
            return made[compute][nth]

        held = list(arrays)
        for positions, compute in gradients:
            for nth, i in enumerate(positions):
                identity: Any = mx.custom_function(lambda a: a)
                identity.vjp(lambda *_, of=compute, nth=nth: gradient(of, nth))
                held[i] = identity(arrays[i])
        return cast(Outputs, node(*held))

    return run


def replaced(items: Sequence[Any], at: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Items, with others at some places."""
    found = [*items]
    for i, other in zip(at, others, strict=True):
        found[i] = other
    return found


def with_frozen(op: str, arrays: list[mx.array]) -> list[mx.array]:
    """The arrays; those that are not floating-point raise where somebody asks for a gradient."""
    frozen = [i for i, a in enumerate(arrays) if not is_float(a)]
    if not frozen:
        return arrays

    def refuse(given: Any, *_: Any) -> NoReturn:
        dtypes = ", ".join(dict.fromkeys(str(a.dtype) for a in listed(given)))
        raise ValueError(
            f"[{op}] no gradient wrt the quantized weights or indices, an array of {dtypes}: "
            "freeze it"
        )

    identity: Any = mx.custom_function(lambda *given: list(given))
    identity.vjp(refuse)
    identity.jvp(refuse)
    return replaced(arrays, frozen, identity(*(arrays[i] for i in frozen)))


def is_float(array: Any) -> bool:
    return array is not None and bool(mx.issubdtype(array.dtype, mx.floating))


def listed(outputs: Any) -> list[mx.array]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
