"""Operations that compute by a kernel and have the gradient of a composition of MLX's operators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

# The threads that are inside :func:`without_gradients`: to ask who they are takes less time than a
# variable of each thread, and mostly there is none.
bare_threads: set[int] = set()


@contextmanager
def without_gradients() -> Iterator[None]:
    """Inside, in this thread, operations are launches and no more: they cannot be differentiated.

    For what is traced to be evaluated only: a node that carries a gradient costs as much to
    evaluate as one that launches a kernel.
    """
    thread = threading.get_ident()
    if thread in bare_threads:
        yield
        return
    bare_threads.add(thread)
    try:
        yield
    finally:
        bare_threads.discard(thread)


def gradients_are_left_out() -> bool:
    """Whether this thread is inside :func:`without_gradients`."""
    return bool(bare_threads) and threading.get_ident() in bare_threads


def with_gradient_of(
    composed: Callable[..., list[mx.array]], launch: Callable[..., list[mx.array]]
) -> Callable[..., Any]:
    """``launch``, differentiated as ``composed`` is.

    Args:
        composed: takes trees of arrays, of which some may be None.
        launch: computes the same from the same arguments.
    """
    function = mx.custom_function(launch)

    @function.vjp
    def gradient(primals: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> Any:
        return _floating_vjp(composed, primals, cotangents)

    def run(*arguments: Any) -> Any:
        return (launch if gradients_are_left_out() else function)(*arguments)

    return run


def _floating_vjp(
    function: Callable[..., list[mx.array]], primals: Any, cotangents: Sequence[mx.array]
) -> Any:
    """Gradients by trees of arguments: zero for what holds integers, None where there is none."""
    leaves: list[tuple[str, Any]]
    leaves = list(tree_flatten(primals, is_leaf=lambda leaf: leaf is None))  # type: ignore[arg-type]
    floats = [
        i
        for i, (_, a) in enumerate(leaves)
        if a is not None and mx.issubdtype(a.dtype, mx.floating)
    ]

    def of_floats(*given: mx.array) -> list[mx.array]:
        merged = list(leaves)
        for i, a in zip(floats, given, strict=True):
            merged[i] = (leaves[i][0], a)
        return function(*tree_unflatten(merged))

    found = mx.vjp(of_floats, [leaves[i][1] for i in floats], list(cotangents))[1]
    gradients = [(key, None if a is None else mx.zeros_like(a)) for key, a in leaves]
    for i, gradient in zip(floats, found, strict=True):
        gradients[i] = (leaves[i][0], gradient)
    return tuple(tree_unflatten(gradients))
