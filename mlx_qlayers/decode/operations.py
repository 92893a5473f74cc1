"""How nodes that rules put into a graph are computed: by this package's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..metal.gather_qmm.experts import share_experts
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS
from ..ops.attention import ATTENTION, ATTENTION_ROWS
from ..ops.attention_invariant import attention_from
from ..ops.attention_step import ATTENTION_STEP
from ..ops.embedding import QUANTIZED_ROWS
from ..ops.experts import (
    EXPERTS_CHOSEN,
    EXPERTS_COMBINED,
    EXPERTS_PRODUCTS,
    experts_products,
    gated,
    leaves_experts,
)
from ..ops.fused_products import FUSED_PRODUCTS
from ..ops.gated_delta import GATED_DELTA, left_to_mlx_lm
from ..ops.gather_qmm import gather_qmm
from ..ops.latent_attention import LATENT_ATTENTION
from ..ops.quantized_route import is_qmv
from ..ops.rotary import ROTARY
from ..ops.swiglu import swiglu
from ..options import PackedMatrix
from ..runtime.devices import device_of
from ..runtime.spec import Spec
from .graph import Node, resolved
from .primitives import Dispatched

# From a node and the numbers that are known to what its arrays are given to.
Maker = Callable[[Node, Mapping[str, int]], Callable[..., Any] | Dispatched]


def _attention(node: Node, values: Mapping[str, int]) -> Dispatched:
    scale, causal, *parts = node.arg
    rule = "causal" if causal else None
    return Dispatched(ATTENTION, (tuple(parts) or (0, 0), scale, rule, None, None, False))


def _attention_from(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    scale, causal, *parts = node.arg

    def attend(q: mx.array, *rest: Any) -> mx.array:
        *arrays, mask, sinks, starts = rest
        k, v = (tuple(arrays[:3]), tuple(arrays[3:])) if parts else arrays
        starts = mx.zeros((len(q),), mx.int32) if starts is None else starts.astype(mx.int32)
        seen = "causal" if causal else mask
        return attention_from(starts, q, k, v, scale=scale, mask=seen, sinks=sinks)

    return attend


def _entry(at: mx.array, i: int) -> mx.array:
    """One of the positions, as a view: to gather it would be a launch."""
    return at[i : i + 1].reshape(())


@lru_cache(maxsize=8)
def _rows_from_0(count: int) -> mx.array:
    """The numbers of rows, a constant of compiled steps: to evaluate it anew waits for the GPU."""
    rows = mx.arange(count)
    mx.eval(rows)
    return rows


def _shown(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Which rows of a cache and its append buffer tokens see."""
    window, keep, size, padded = node.arg

    def shown(at: mx.array, buffer: mx.array, appended: mx.array) -> Any:
        row = _rows_from_0(buffer.shape[2] + appended.shape[2])
        start, held, last = (_entry(at, i) for i in (0, 1, at.size - 1))
        # How many tokens came since that of a row.
        age = held + start - row
        if size:  # rows of the append buffer overwrite those of a ring in turn
            order = (row - last + held) % (size - keep)
            age = mx.where(row < start, size - keep - order + held, age)
        behind = ((age < window - keep) | (row < keep))[None, None, None] if window else None
        if not padded:
            return behind
        own = age <= at[2 : 2 + len(buffer), None, None, None]
        return own if behind is None else own & behind

    return shown


def _experts(node: Node, values: Mapping[str, int]) -> Any:
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


def _combined(node: Node, values: Mapping[str, int]) -> Any:
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


def _alone(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Products with the matrices that rows chose, as a layer computes them."""

    def products(x: mx.array, chosen: mx.array, _: None, *flat: Any) -> mx.array:
        matrix, more = PackedMatrix(*flat), (-2,) if x.ndim > chosen.ndim else (-2, -3)
        arrays = mx.expand_dims(x, more), *matrix[:3], None, chosen
        y = gather_qmm(*arrays, True, *node.arg[:3]).squeeze(-2)
        return y if matrix.bias is None else y + matrix.bias[chosen]

    return products


def _delta(node: Node, values: Mapping[str, int]) -> Any:
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


def _depthwise(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
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


def _heads(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
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


OPERATIONS: dict[str, Maker] = {
    "Attention": _attention,
    "AttentionFrom": _attention_from,
    "AttentionPacked": _attention,
    "AttentionRows": lambda node, values: Dispatched(ATTENTION_ROWS, node.arg),
    "AttentionStep": lambda node, values: Dispatched(ATTENTION_STEP, node.arg),
    "Chosen": lambda node, values: Dispatched(EXPERTS_CHOSEN, node.arg),
    "Combined": _combined,
    "Depthwise": _depthwise,
    "Embedding": lambda node, values: Dispatched(QUANTIZED_ROWS, node.arg),
    "Experts": _experts,
    "ExpertsAlone": _alone,
    "GatedDelta": _delta,
    "Gelu": lambda node, values: nn.gelu,
    "GeluApprox": lambda node, values: nn.gelu_approx,
    "Heads": _heads,
    "Latent": lambda node, values: Dispatched(LATENT_ATTENTION, node.arg),
    "Products": lambda node, values: Dispatched(FUSED_PRODUCTS, node.arg),
    "Rotary": lambda node, values: Dispatched(ROTARY, node.arg),
    "Shown": _shown,
    "Silu": lambda node, values: nn.silu,
    "Swiglu": lambda node, values: swiglu,
}
