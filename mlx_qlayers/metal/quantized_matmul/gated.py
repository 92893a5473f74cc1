"""Launches what follows the products of a gated unit with many rows."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...runtime.spec import Spec
from ..common.kernels import constants, large_kernel
from .qmv import GATES, Gate

# Neighbours of a thread.
RUN = 8

_ROWS = large_kernel("gated_rows", "quantized_matmul/gated.metal", registers=3 * RUN)


def gated_rows(x: Spec, gate: Gate) -> Callable[[mx.array], mx.array]:
    """Binds x (M, 2 N) to ``activation(first) * second``, N a multiple of :data:`RUN`.

    MLX compiles a kernel for that, on NVIDIA GPUs for seconds, which takes twice as long as this.
    """
    rows, columns = x.shape[0], x.shape[1] // 2
    count = rows * columns // RUN
    shape = constants([columns // RUN, count])
    launch = _ROWS.bind(
        [x, shape],
        template={"T": x.dtype, "gate": GATES.index(gate)},
        grid=(count, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(rows, columns)],
    )
    return lambda x: launch([x, shape])[0]
