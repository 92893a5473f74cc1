"""Launches the kernels of the gradients of scales and biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from ...options import MatmulCall
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.spec import Spec
from ..common.kernels import large_kernel

# Rows and columns of a threadgroup's tile, and its threads.
_ROWS, _COLUMNS, _THREADS = 64, 128, 128
# Sums that a thread keeps where threads do not run side by side.
_SUMS = 256


def _registers(T: mx.Dtype, group: int, **_: object) -> int:
    """Words of the arrays of a thread: sums of 16 x 128 in a SIMD group, and operands."""
    return 64 + (4 if group <= 64 else 2) * T.size + T.size


_kernel: Callable[..., Kernel] = partial(large_kernel, file="quantized_matmul/gradients.metal")
_TILES = _kernel(
    "quantized_gradients_tiles",
    max_threads=_THREADS,
    threadgroup_memory=lambda T, **_: 64 * (_ROWS + _COLUMNS + 32 // T.size),
    registers=_registers,
)
_GROUPS = _kernel("quantized_gradients_groups")


def scales_and_biases_gradient(
    call: MatmulCall, dy: Spec, device: str, chosen: tuple[Spec, Spec, Spec] | None = None
) -> Callable[..., list[mx.array]]:
    """Binds the gradients of scales and biases of affine matrices, deterministic, rounded once.

    ``chosen`` are, for several matrices: rows of ``x`` and of ``dy`` by matrix, and where those of
    each matrix begin, the number of all rows last, uint32.
    """
    x, (w, scales, *_), transpose, fmt = call
    left = dy if transpose else x
    (*leading, rows, _), columns = w.shape, fmt.dims(w)
    shape = mx.array([prod(left.shape[:-1]), rows, columns], mx.int32)
    if not device_of(device).gpu:
        outputs = max(1, _SUMS // fmt.group_size)
        tiles = -(-rows // outputs)
        kernel, threads = _GROUPS, min(tiles, 8)
        own: dict[str, TemplateValue] = {"outputs": outputs}
        across, down = -(-tiles // threads) * threads, columns // fmt.group_size
    else:
        kernel, threads, own = _TILES, _THREADS, {"wide": rows % 8 == 0}
        across, down = -(-columns // _COLUMNS) * _THREADS, -(-rows // _ROWS)
    gathered = chosen is not None

    def ordered(x: Any, dy: Any, w: Any, *chosen: Any) -> list[Any]:
        x_rows, dy_rows, offsets = chosen or (w, w, w)
        if transpose:
            x, dy, x_rows, dy_rows = dy, x, dy_rows, x_rows
        return [x, dy, w, x_rows, dy_rows, offsets, shape]

    launch = kernel.bind(
        ordered(x, dy, w, *(chosen or ())),
        template={"T": left.dtype, "S": scales.dtype, "group": fmt.group_size, "bits": fmt.bits}
        | {"gathered": gathered, **own},
        grid=(across, down, prod(leading)),
        threadgroup=(threads, 1, 1),
        output_shapes=[scales.shape, scales.shape],
    )
    return lambda *arrays: launch(ordered(*arrays))
