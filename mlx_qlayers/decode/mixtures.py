"""How nodes of mixtures of experts, recurrent layers and latent attention are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ..formats import Format
from ..metal.gather_qmm.experts import share_experts
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS
from ..ops.experts import (
    EXPERTS_COMBINED,
    EXPERTS_PRODUCTS,
    experts_products,
    gated,
    leaves_experts,
)
from ..ops.gated_delta import GATED_DELTA, left_to_mlx_lm
from ..ops.gather_qmm import gather_qmm
from ..ops.quantized_route import is_qmv
from ..options import PackedMatrix
from ..runtime.devices import device_of
from ..runtime.spec import Spec
from .graph import Node, resolved
from .primitives import Dispatched


def experts(node: Node, values: Mapping[str, int]) -> Any:
    """Products with the matrices that rows chose."""
    (x, chosen, squares, *_), (*fmt, gate, eps) = node.src, node.arg
    if is_qmv(_rows(x, values, len(x.shape) > len(chosen.shape))):
        static = Format(*fmt), gate, 0.0 if squares is None else eps
        return Dispatched(EXPERTS_PRODUCTS, static)
    single = len(node.outputs) == 1

    def products(x: mx.array, chosen: mx.array, _: None, *flat: Any) -> Any:
        matrices = [PackedMatrix(*flat[i : i + 4]) for i in range(0, len(flat), 4)]
        made = [_sorted(x, chosen, each, Format(*fmt)) for each in matrices]
        made = made if gate is None else [gated(gate, *made)]
        return made[0] if single else made

    return products


def _rows(x: Node, values: Mapping[str, int], chosen: bool) -> Spec:
    """The rows that experts are chosen for, of which there may be one for each choice."""
    *shape, width = resolved(x.shape, values)
    return Spec((*shape[: -1 if chosen else None], width), x.dtype)


def _sorted(x: mx.array, chosen: mx.array, matrix: PackedMatrix, fmt: Format) -> mx.array:
    """Products of many rows, which share what they read of a matrix."""
    flat, rows = chosen.flatten(), x.reshape(-1, 1, x.shape[-1])
    order = mx.argsort(flat)
    at = order if x.ndim > chosen.ndim else order // chosen.shape[-1]
    right = flat[order]
    y = gather_qmm(rows[at], *matrix[:3], None, right, True, *fmt, sorted_indices=True)
    if matrix.bias is not None:
        y = y + matrix.bias[right][:, None]
    return y[mx.argsort(order)].reshape(*chosen.shape, -1)


def combined(node: Node, values: Mapping[str, int]) -> Any:
    """The sum, by scores, of products with a matrix."""
    fmt, (x, _, scores, w, *_) = Format(*node.arg), node.src
    few = is_qmv(_rows(x, values, True))
    if few and not share_experts(resolved(scores.shape, values), w.shape[0]):
        return Dispatched(EXPERTS_COMBINED, (fmt,))

    def total(x: mx.array, chosen: mx.array, scores: mx.array, *flat: Any) -> mx.array:
        matrix, residual = PackedMatrix(*flat[:4]), flat[4]
        # Only the product reads matrices once for all sequences.
        if few:
            (y,) = experts_products(x, chosen, [matrix], fmt)
        else:
            y = _sorted(x, chosen, matrix, fmt)
        y = (y * scores[..., None]).sum(axis=-2).astype(y.dtype)
        return y if residual is None else residual + y

    return total


def alone(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Products with the matrices that rows chose, as a layer computes them."""

    def products(x: mx.array, chosen: mx.array, _: None, *flat: Any) -> mx.array:
        matrix, more = PackedMatrix(*flat), (-2,) if x.ndim > chosen.ndim else (-2, -3)
        arrays = mx.expand_dims(x, more), *matrix[:3], None, chosen
        y = gather_qmm(*arrays, True, *node.arg[:3]).squeeze(-2)
        return y if matrix.bias is None else y + matrix.bias[chosen]

    return products


def delta(node: Node, values: Mapping[str, int]) -> Any:
    """The gated delta rule."""
    (norms,) = node.arg
    if not left_to_mlx_lm() or node.outputs[1].shape[-1] % 32:
        return Dispatched(GATED_DELTA, node.arg)
    from mlx_lm.models.gated_delta import gated_delta_kernel

    def step(q: mx.array, k: mx.array, *arrays: Any) -> Any:
        if norms is not None:
            epsilon, *factors = norms
            pairs = zip(factors, (q, k), strict=True)
            q, k = (by * mx.fast.rms_norm(each, None, epsilon) for by, each in pairs)
        return gated_delta_kernel(q, k, *arrays)

    return step


def depthwise(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """A few rows of a depthwise convolution: MLX has no kernel for them."""
    length = node.shape[1]

    def convolve(x: mx.array, w: mx.array) -> mx.array:
        rows, weights = x.astype(mx.float32), w.squeeze(-1).T
        if length > 1 or device_of().gpu:  # a sum of products is one launch there
            terms = [rows[:, i : i + length] * each for i, each in enumerate(weights)]
            y = sum(terms[1:], start=terms[0])
        else:
            y = (rows * weights).sum(1, keepdims=True)
        return y.astype(x.dtype)

    return convolve


def heads(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Products with a matrix for each head, which are products with experts."""
    fmt, (batch, count, *_) = Format(*node.arg), resolved(node.shape, values)
    every, takes = mx.array([[*range(count)]] * batch, mx.uint32), list[bool]()

    def products(x: mx.array, *packed: mx.array) -> mx.array:
        rows, matrix = x.squeeze(2), PackedMatrix(*packed)
        if not takes:
            takes.append(batch <= MAX_QMV_ROWS and not leaves_experts(rows, every, matrix, fmt))
        if takes[0]:
            return mx.expand_dims(experts_products(rows, every, [matrix], fmt)[0], 2)
        return mx.quantized_matmul(x, *matrix[:3], True, *fmt)

    return products
