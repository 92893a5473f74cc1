"""Prompts through a model's layers on CUDA, in little memory.

MLX hands work over long before it is done, and what it computes with stays in memory until then:
for 2,048 rows of a model with 7 billion parameters 14 GB, most of it dense weights, which takes
time to allocate, too. So here a layer waits until the one before the last is done: on an H200 a
prompt of 16,384 tokens took 503 ms where it had taken 750, and 1.9 GB beside its cache where it had
taken 15.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import mlx.core as mx

from ..decode import engine
from ..ops.quantized_route import is_dense
from ..runtime.backend import within
from ..runtime.cuda_ahead import compiled_in_parallel, finish
from ..runtime.transformed import is_transformed

# The queries of the last layer that was called, in a call of a model.
_queries: ContextVar[list[mx.array] | None] = ContextVar("queries", default=None)


def in_turn(call: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    """Call a model. On CUDA layers of a prompt wait in turn, and kernels are compiled at once."""
    if engine.where() is None:
        return call(model, *args, **options)
    with within(_queries, []), compiled_in_parallel():
        return call(model, *args, **options)


def wait(queries: mx.array) -> None:
    """Wait for the layer before, ahead of a layer's attention with these queries (B, H, L, D).

    The output of the last layer is not evaluated, as nobody may ask for it.
    """
    before = _queries.get()
    if before is None or not is_dense(queries[:, 0]):
        return
    if not is_transformed([queries]):  # else they are being evaluated now
        finish()
        mx.eval(before)
        before[:] = [queries]
