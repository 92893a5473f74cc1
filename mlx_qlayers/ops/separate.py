"""Gradients that are computed one by one, for backends whose launches run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx


def separate_gradients(
    forward: Callable[..., mx.array], *gradients: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    """A differentiable function that computes the gradient of an argument only if it is asked for.

    MLX asks an ``mx.custom_function`` for the gradients of all its arguments, and being lazy later
    evaluates those that are used. Where a launch runs at once that is too late. Here every argument
    passes an identity of its own first, whose gradient MLX asks for only where it needs it.

    Args:
        forward: a function of some arrays.
        gradients: one function for each of them, of all arrays and the cotangent.

    Example:
        >>> product = separate_gradients(mx.multiply, lambda a, b, d: b * d, lambda a, b, d: a * d)
        >>> mx.grad(product)(mx.array(2.0), mx.array(3.0)).item()
        3.0
    """

    def function(*arguments: mx.array) -> mx.array:
        # What the whole function's vjp is given; the identities' own come after it.
        given: list[mx.array] = []

        @mx.custom_function
        def whole(*held: mx.array) -> mx.array:
            return forward(*held)

        @whole.vjp
        def _(
            primals: tuple[mx.array, ...] | mx.array, cotangent: mx.array, _: mx.array
        ) -> tuple[mx.array, ...]:
            # MLX hands over a single argument itself.
            held = primals if isinstance(primals, tuple) else (primals,)
            given[:] = [*held, cotangent]
            return tuple(mx.broadcast_to(mx.array(0, a.dtype), a.shape) for a in held)

        def hold(argument: mx.array, gradient: Callable[..., mx.array]) -> mx.array:
            @mx.custom_function
            def identity(a: mx.array) -> mx.array:
                return a

            @identity.vjp
            def _(primal: mx.array, zeros: mx.array, _: mx.array) -> mx.array:
                return gradient(*given)

            return cast(mx.array, identity(argument))

        return cast(
            mx.array, whole(*(hold(a, g) for a, g in zip(arguments, gradients, strict=True)))
        )

    return function
