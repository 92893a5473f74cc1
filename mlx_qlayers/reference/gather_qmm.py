"""Gathered quantized products in plain MLX operators: the oracle, and the path without a kernel.

On a GPU this is ``mx.gather_qmm`` itself. On a CPU the stock operator is 20 to 60 times slower in
half precision than in float32, runs on one core, and knows no global scale.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import mlx.core as mx

from ..formats import GLOBAL_UNIT
from ..options import MatmulCall
from .cores import core_stream, parts


def gather_qmm(
    call: MatmulCall, leading: tuple[int, ...], sorted_indices: bool
) -> Callable[..., mx.array]:
    """``x[lhs] @ w[rhs].T`` (or ``x[lhs] @ w[rhs]``) for packed matrices; arguments checked.

    The function takes x, w, scales, biases (affine, else None), flat indices of the leading
    dimensions of ``x`` and of ``w`` (None for all of them), and one global scale for each matrix
    (nvfp4) or None. It gives (*leading, M, N).
    """
    x, (w, *_), transpose, fmt = call
    out = x.dtype
    if mx.default_device().type == mx.gpu:
        return lambda x, w, scales, biases, left, right, global_scale: fmt.gather_qmm(
            *(x, w, scales, biases, left, right, transpose),
            global_scale=global_scale,
            sorted_indices=sorted_indices,
        )
    shape = (*leading, x.shape[-2], w.shape[-2] if transpose else fmt.dims(w))
    if 0 in shape:
        return lambda *_: mx.zeros(shape, out)
    pieces = enumerate(parts(prod(leading), x.shape[-1] * prod(shape[-2:])))
    cores = [(core_stream(core), part) for core, part in pieces]
    every = [mx.arange(prod(a.shape[:-2])).reshape(a.shape[:-2]) for a in (x, w)]

    def run(*arrays: Any) -> mx.array:
        x, w, scales, biases, left, right, global_scale = arrays
        # MLX's operator has no gradient for an x without leading dimensions.
        x = x.astype(mx.float32).reshape(-1, *x.shape[-2:])
        left = mx.broadcast_to(every[0] if left is None else left, leading).flatten()
        right = mx.broadcast_to(every[1] if right is None else right, leading).flatten()
        products = []
        for core, part in cores:
            given = x, w, scales, biases, left[part], right[part], transpose
            products.append(fmt.gather_qmm(*given, stream=core))
        y = mx.concatenate(products)
        if global_scale is not None:
            y = y * (global_scale.flatten() / GLOBAL_UNIT)[right][:, None, None]
        return y.astype(out).reshape(shape)

    return run
