"""How nodes that rules put into a graph are computed: by this package's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..dispatch import dispatch
from ..ops.attention import attention
from ..ops.attention_step import ATTENTION_STEP
from ..ops.embedding import quantized_rows
from ..ops.fused_products import FUSED_PRODUCTS
from . import mixtures
from .graph import Node

# From a node and the numbers that are known to a function of its arrays.
Maker = Callable[[Node, Mapping[str, int]], Callable[..., Any]]


def _embedding(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    size, bits, mode = node.arg

    def rows(tokens: mx.array, *packed: Any) -> mx.array:
        return quantized_rows(tokens, *packed, group_size=size, bits=bits, mode=mode)

    return rows


def _unpacked(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    size, bits, mode = node.arg
    return partial(mx.dequantize, group_size=size, bits=bits, mode=mode)


def _products(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    single = len(node.outputs) == 1

    def products(*arrays: Any) -> Any:
        made = dispatch(FUSED_PRODUCTS, arrays, node.arg)
        return made[0] if single else made

    return products


def _attention(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    scale, causal = node.arg

    def attend(q: mx.array, k: Any, v: Any, mask: Any, sinks: Any) -> mx.array:
        own = "causal" if causal else mask
        return attention(q, k, v, scale=scale, mask=own, sinks=sinks)

    return attend


def _attention_step(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    scale, rotation, epsilon, *parts = node.arg

    def attend(*arrays: Any) -> Any:
        return dispatch(ATTENTION_STEP, arrays, (scale, rotation, epsilon, *parts))

    return attend


def _position(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    (more,), dtype = node.arg, node.dtype

    def position(at: mx.array) -> mx.array:
        entry = at[2:3].reshape(()).astype(dtype)
        return entry + more if more else entry

    return position


def _ring_mask(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Which rows of a full ring and its tail a token sees: those in order that are not gone."""
    size, keep = node.arg

    def seen(at: mx.array, ring: mx.array, tail: mx.array) -> mx.array:
        row, start, held = mx.arange(ring.shape[2] + tail.shape[2]), at[0], at[1]
        age = mx.where(row < start, size - keep - _order(row, at, node) + held, held - row + start)
        return ((age < size - keep) | (row < keep))[None, None, None]

    return seen


def _order(row: mx.array, at: mx.array, node: Node) -> mx.array:
    """Which row of the tail overwrites one of the ring's."""
    size, keep = node.arg
    return (row - at[at.size - 1] + at[1]) % (size - keep)


def _ring_shown(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """A ring with its tail in it, as the cache shows it."""
    _, keep = node.arg

    def shown(ring: mx.array, tail: mx.array, at: mx.array) -> mx.array:
        row = mx.arange(ring.shape[2])
        order = _order(row, at, node)
        new = ((order <= at[1]) & (row >= keep))[:, None]
        return mx.where(new, mx.take(tail, mx.minimum(order, tail.shape[2] - 1), axis=2), ring)

    return shown


def _padding_mask(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Which rows of a cache hold tokens of each sequence, and no padding ahead of them."""
    return lambda padding, keys: mx.arange(keys.shape[2]) >= padding[:, None, None, None]


OPERATIONS: dict[str, Maker] = {
    "Attention": _attention,
    "AttentionStep": _attention_step,
    "Choices": mixtures.choices,
    "Chosen": mixtures.chosen,
    "Combined": mixtures.combined,
    "Depthwise": mixtures.depthwise,
    "Embedding": _embedding,
    "Experts": mixtures.experts,
    "GatedDelta": mixtures.delta,
    "Gelu": lambda node, values: nn.gelu,
    "GeluApprox": lambda node, values: nn.gelu_approx,
    "PaddingMask": _padding_mask,
    "Position": _position,
    "Heads": mixtures.heads,
    "Latent": mixtures.latent,
    "RingMask": _ring_mask,
    "RingShown": _ring_shown,
    "Products": _products,
    "Unpacked": _unpacked,
    "Silu": lambda node, values: nn.silu,
}
