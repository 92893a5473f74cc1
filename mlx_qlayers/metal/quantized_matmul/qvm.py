"""Launches qvm: up to 16 rows times a quantized matrix that is not transposed, on a CPU.

On GPUs qmm takes such products, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...options import MatmulCall
from ..common.kernels import large_kernel
from .qmm import split_k
from .qmv_config import MAX_QMV_ROWS

# Threads of a threadgroup, and rows of the matrix that a thread unpacks before it multiplies them.
_THREADS, _BLOCK = 8, 8
_QVM = large_kernel(
    "qvm",
    "quantized_matmul/qvm.metal",
    registers=lambda rows, run, block, **_: (rows + block) * run,
)


def qvm(call: MatmulCall) -> Callable[..., mx.array]:
    """Binds ``x @ w + bias`` for 1 to 16 rows; ``w`` is read once, sums are rounded once."""
    rows, n, k = call.shape
    # The sums of a row fill two of the widest vectors there are while they meet the weights.
    run = min(call.fmt.group_size, 32)
    return split_k(
        _QVM,
        call,
        k,
        template={"rows": 1 if rows == 1 else MAX_QMV_ROWS, "run": run, "block": _BLOCK},
        grid=(-(-n // (run * _THREADS)) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
    )
