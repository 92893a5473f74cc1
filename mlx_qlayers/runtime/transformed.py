"""Whether arrays belong to a transformation of MLX's: a gradient, a compilation, a vmap.

MLX has no function that tells. But such arrays cannot be evaluated in the background:
:func:`mx.async_eval` refuses a node of theirs that has not been evaluated yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn, cast

import mlx.core as mx


def is_transformed(arrays: Sequence[mx.array]) -> bool:
    """Whether a transformation (``mx.grad``, ``mx.compile``, ``mx.vmap``) follows an array."""
    try:
        # A node that depends on all of them: arrays with values would be passed over.
        mx.async_eval(*mx.depends(arrays[:1], arrays))
    except ValueError:
        return True
    return False


def is_traced(indices: mx.array) -> bool:
    """The same of an array of integers, of which no gradient is taken, without a node for it."""
    try:
        mx.async_eval(indices)
    except ValueError:
        return True
    return False


def has_values(arrays: Sequence[mx.array]) -> bool:
    """Wait for the values of arrays; false where ``mx.compile`` or ``mx.vmap`` is tracing."""
    try:
        mx.eval(*arrays)
    except ValueError as error:
        if "transformations" not in str(error):
            raise
        return False
    return True


def without_graph(array: mx.array) -> mx.array:
    """The same numbers, by way of the host's memory.

    Inside of ``mx.grad`` an array holds all that it was computed from, even with a value.
    """
    import numpy as np  # which the import of this package does not wait for

    if array.dtype == mx.bfloat16:  # of which NumPy knows nothing
        return without_graph(array.view(mx.uint16)).view(mx.bfloat16)
    return mx.array(np.asarray(array))


@contextmanager
def uncompiled(when: bool = True) -> Iterator[None]:
    """Have ``mx.compile`` run functions as they are in a ``with`` block, in all threads."""
    if when:
        mx.disable_compile()
    try:
        yield
    finally:
        if when:
            mx.enable_compile()


def is_differentiated() -> bool:
    """Whether this thread is inside ``mx.grad``, ``mx.vjp`` or ``mx.jvp``, on CUDA.

    There MLX's kernel of few queries refuses, since it cannot give what the gradient needs.
    """
    fused: Any = mx.fast.scaled_dot_product_attention
    try:
        fused(*_no_queries(), scale=1.0, force_fused=True)
    except ValueError:
        return True
    return False


@cache
def _no_queries() -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of a call that cuDNN does not take, being float32."""
    q, k = mx.zeros((1, 1, 0, 64)), mx.zeros((1, 1, 1, 64))
    mx.eval(q, k)
    return q, k, k


def without_derivative(
    launch: Callable[[], list[mx.array]], inputs: Sequence[mx.array]
) -> list[mx.array]:
    """Wrap a launch's results in a node that raises in a derivative, as a launch on a GPU does.

    On the host backend results are constants to MLX, whose derivative would be zero without a word.
    """

    def run(*_: mx.array) -> list[mx.array]:
        return launch()

    node: Any = mx.custom_function(run)
    node.vjp(no_derivative)
    node.jvp(no_derivative)
    return cast(list[mx.array], node(*inputs))


def no_derivative(*_: Any) -> NoReturn:
    """Raise, in place of a derivative."""
    raise ValueError(
        "a kernel's launch has no derivative of its own: wrap it in mx.custom_function. For second "
        "derivatives and mx.jvp of this package's operations take the reference path, "
        'use_backend("reference")'
    )
