"""How nodes of mixtures of experts, recurrent layers and latent attention are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from ..formats import Format
from ..metal.gather_qmm.experts import share_experts
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS
from ..ops.experts import experts_chosen, experts_combined, experts_products, gated, leaves_experts
from ..ops.gated_delta import gated_delta
from ..ops.gather_qmm import gather_qmm
from ..ops.latent_attention import latent_attention
from ..ops.quantized_route import is_qmv
from ..options import PackedMatrix
from ..runtime.backend import backend
from .graph import Node, resolved


def experts(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Products with the matrices that rows chose."""
    *fmt, gate, eps = node.arg
    single = len(node.outputs) == 1

    def products(x: mx.array, chosen: mx.array, squares: Any, *flat: Any) -> Any:
        matrices = [PackedMatrix(*flat[i : i + 4]) for i in range(0, len(flat), 4)]
        norm = None if squares is None else (squares, eps)
        if is_qmv(x[..., 0, :] if x.ndim > chosen.ndim else x):
            made = experts_products(x, chosen, matrices, Format(*fmt), gate, norm)
        else:
            made = [_sorted(x, chosen, each, Format(*fmt)) for each in matrices]
            made = made if gate is None else [gated(gate, *made)]
        return made[0] if single else made

    return products


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


def combined(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """The sum, by scores, of products with a matrix."""
    fmt = Format(*node.arg)

    def total(x: mx.array, chosen: mx.array, scores: mx.array, *flat: Any) -> mx.array:
        matrix, residual = PackedMatrix(*flat[:4]), flat[4]
        if is_qmv(x[..., 0, :]) and not share_experts(scores.shape, len(matrix.w)):
            return experts_combined(x, chosen, scores, matrix, fmt, residual)
        # Only the product reads matrices once for all sequences.
        if is_qmv(x[..., 0, :]):
            (y,) = experts_products(x, chosen, [matrix], fmt)
        else:
            y = _sorted(x, chosen, matrix, fmt)
        y = (y * scores[..., None]).sum(axis=-2).astype(y.dtype)
        return y if residual is None else residual + y

    return total


def choices(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Products as the model's code has them."""

    def ordered(y: mx.array, order: mx.array | None = None) -> mx.array:
        return y[..., None, :] if order is None else y.reshape(-1, 1, y.shape[-1])[order]

    return ordered


def chosen(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Experts and their shares."""
    (router,) = node.arg

    def choose(logits: mx.array, bias: Any, factors: Any) -> list[mx.array]:
        return experts_chosen(logits, router, bias, factors)

    return choose


def delta(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """The gated delta rule."""
    (norms,) = node.arg
    if backend() != "metal" or node.outputs[1].shape[-1] % 32:
        return partial(gated_delta, norms=norms)
    from mlx_lm.models.gated_delta import gated_delta_kernel

    def step(q: mx.array, k: mx.array, *arrays: Any) -> Any:
        if norms is not None:
            epsilon, *factors = norms
            q, k = (
                factor * mx.fast.rms_norm(each, None, epsilon)
                for factor, each in zip(factors, (q, k), strict=True)
            )
        return gated_delta_kernel(q, k, *arrays)

    return step


def depthwise(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """A few rows of a depthwise convolution: MLX has no kernel for them."""
    length = node.shape[1]

    def convolve(x: mx.array, w: mx.array) -> mx.array:
        rows, weights = x.astype(mx.float32), w.squeeze(-1).T
        if length > 1 or mx.default_device() == mx.gpu:  # a sum of products is one launch there
            terms = [rows[:, i : i + length] * each for i, each in enumerate(weights)]
            y = sum(terms[1:], start=terms[0])
        else:
            y = (rows * weights).sum(1, keepdims=True)
        return y.astype(x.dtype)

    return convolve


def latent(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Latent attention of a token."""
    (scale,) = node.arg

    def attend(
        q: mx.array, r: mx.array, c: mx.array, p: mx.array, last: mx.array, mask: Any
    ) -> Any:
        return latent_attention(q, r, c, p, last, scale=scale, mask=mask)

    return attend


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
