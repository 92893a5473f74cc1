"""Launches the tiled products of many rows with the quantized matrices that they choose."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Any

import mlx.core as mx

from ...formats import GLOBAL_UNIT, Format
from ...options import MatmulCall
from ...runtime.devices.record import MAX_THREADS
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..common.kernels import constants, large_kernel, of_kernel
from ..quantized_matmul import qmm_tensor
from ..quantized_matmul.qmm import QmmConfig, registers, threadgroup_memory
from ..quantized_matmul.qmm_tensor import TensorConfig
from ..quantized_matmul.tile import packed_template, whole_words
from .gather_qmv import Pairs, Products

_LIST = Kernel(
    "gather_qmm_list", "gather_qmm/gather_qmm.metal", threadgroup_memory=lambda threads: 4 * threads
)
_TILES = large_kernel(
    "gather_qmm_tiles",
    "gather_qmm/gather_qmm.metal",
    threadgroup_memory=threadgroup_memory,
    registers=registers,
)
_TENSORS = large_kernel(
    "gather_qmm_tensor",
    "gather_qmm/gather_qmm_tensor.metal",
    threadgroup_memory=qmm_tensor.threadgroup_memory,
    registers=qmm_tensor.registers,
)


def gather_qmm_config(rows: int, matrices: int, dtype: mx.Dtype, fmt: Format) -> QmmConfig:
    """The configuration of any GPU for so many rows, those of all products, and matrices."""
    run = whole_words(fmt)
    # Two tiles of float32 must fit into the threadgroup memory.
    wide = dtype == mx.float32
    if rows <= 8 * matrices:
        return QmmConfig(16, 64, 64 if wide else 128, 1, 4, run, ahead=False)
    return QmmConfig(32 if wide or rows <= 16 * matrices else 64, 64, 64, 2, 2, run, ahead=False)


def gather_qmm_sorted(
    call: MatmulCall, pairs: Pairs, config: QmmConfig | TensorConfig, scaled: bool = False
) -> Products:
    """Binds :func:`gather_qmv` for many rows in order; weights are rounded to the dtype of x."""
    x, (w, scales, *_), transpose, fmt = call
    (*_, m, k), products, matrices = x.shape, prod(pairs.shape), prod(w.shape[:-2])
    n = w.shape[-2] if transpose else fmt.dims(w)
    tiles = products * m // config.tile_m + min(matrices, products)
    searching = min(1 << (matrices - 1).bit_length(), MAX_THREADS)
    counts = mx.array([products, matrices, m, config.tile_m, tiles], mx.int32)
    listing = _LIST.bind(
        [Spec((products,), mx.uint32), counts],
        template={"threads": searching},
        grid=(searching, 1, 1),
        threadgroup=(searching, 1, 1),
        output_shapes=[(tiles, 3)],
    )
    threads, one = config.threads(x.dtype), mx.array([1.0])
    sizes, factors = constants([n, k]), Spec((matrices,), mx.float32) if scaled else one
    listed = Spec((tiles, 3), mx.uint32)
    kernel = _TENSORS if isinstance(config, TensorConfig) else _TILES
    values = packed_template(fmt, x.dtype, scales.dtype) | asdict(config)
    values |= {"aligned": k * x.dtype.size % 16 == 0, "transposed": transpose, "scaled": scaled}
    launch = kernel.bind(
        [Spec((products, m, k), x.dtype), w, scales, scales, factors, listed, sizes],
        template=of_kernel(kernel, values),
        grid=(tiles * threads, -(-n // config.tile_n), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*pairs.shape, m, n)],
    )
    rows, kind = x.dtype, scales.dtype

    def run(*arrays: Any) -> mx.array:
        x, w, scales, biases, left, right, global_scale = arrays
        left, right = pairs.lists(left, right)
        blocks = x.astype(rows).reshape(-1, m, k)
        if left is not None:
            blocks = blocks[left]
        elif pairs.share > 1:
            blocks = mx.repeat(blocks, pairs.share, 0)
        scales = scales.astype(kind)
        biases = scales if biases is None else biases.astype(kind)
        factors = one if global_scale is None else global_scale.astype(mx.float32) / GLOBAL_UNIT
        (listed,) = listing([right, counts])
        return launch([blocks, w, scales, biases, factors, listed, sizes])[0]

    return run
