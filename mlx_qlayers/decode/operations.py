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
    (entries, more), shape, dtype = node.arg, node.shape, node.dtype

    def position(at: mx.array) -> mx.array:
        entry = at[entries[0] : entries[-1] + 1]
        entry = (entry.sum() if len(entries) > 1 else entry).reshape(shape).astype(dtype)
        return entry + more if more else entry

    return position


def _shown(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Which rows of a cache and its tail tokens see."""
    window, keep, size, padded = node.arg

    def shown(at: mx.array, buffer: mx.array, tail: mx.array) -> Any:
        row, start, held = mx.arange(buffer.shape[2] + tail.shape[2]), at[0], at[1]
        # How many tokens came since that of a row.
        age = held + start - row
        if size:  # rows of the tail overwrite those of a ring in turn
            order = (row - at[at.size - 1] + held) % (size - keep)
            age = mx.where(row < start, size - keep - order + held, age)
        behind = ((age < window - keep) | (row < keep))[None, None, None] if window else None
        if not padded:
            return behind
        own = age <= at[2 : 2 + len(buffer), None, None, None]
        return own if behind is None else own & behind

    return shown


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
    "Position": _position,
    "Heads": mixtures.heads,
    "Latent": mixtures.latent,
    "Products": _products,
    "Shown": _shown,
    "Unpacked": _unpacked,
    "Silu": lambda node, values: nn.silu,
}
