"""Launches what follows the products of a gated unit with many rows."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...runtime.spec import Spec
from ..common.kernels import large_kernel, without
from .qmv import GATES, Gate

# Neighbours of a thread.
RUN = 8

_PAIR = large_kernel(
    "gated_pair", "quantized_matmul/gated.metal", function="gated_rows", registers=3 * RUN
)
_ROWS = without(_PAIR, ("other",), "gated_rows")


def gated_rows(x: Spec, gate: Gate, apart: bool = False) -> Callable[..., mx.array]:
    """Binds x (M, 2 N) to ``activation(first) * second``, N a multiple of :data:`RUN`.

    MLX compiles a kernel for that, on NVIDIA GPUs for seconds, which takes twice as long as this.
    If they are ``apart``, both are arrays (M, N).
    """
    rows, columns = x.shape[0], x.shape[1] // (1 if apart else 2)
    count = rows * columns // RUN
    shape = mx.array([columns // RUN, count], mx.int32)
    launch = (_PAIR if apart else _ROWS).bind(
        [x, x, shape] if apart else [x, shape],
        template={"T": x.dtype, "gate": GATES.index(gate)},
        grid=(count, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(rows, columns)],
    )
    return lambda *rows: launch([*rows, shape])[0]
