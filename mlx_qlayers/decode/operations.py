"""How nodes that rules put into a graph are computed: by this package's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.attention import ATTENTION, ATTENTION_ROWS
from ..ops.attention_invariant import attention_from
from ..ops.attention_step import ATTENTION_STEP
from ..ops.embedding import QUANTIZED_ROWS
from ..ops.experts import EXPERTS_CHOSEN
from ..ops.fused_products import FUSED_PRODUCTS
from ..ops.latent_attention import LATENT_ATTENTION
from ..ops.rotary import ROTARY
from ..ops.swiglu import swiglu
from . import mixtures
from .graph import Node
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


def _shown(node: Node, values: Mapping[str, int]) -> Callable[..., Any]:
    """Which rows of a cache and its append buffer tokens see."""
    window, keep, size, padded = node.arg

    def shown(at: mx.array, buffer: mx.array, appended: mx.array) -> Any:
        row = mx.arange(buffer.shape[2] + appended.shape[2])
        mx.eval(row)  # a constant of a compiled step
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


OPERATIONS: dict[str, Maker] = {
    "Attention": _attention,
    "AttentionFrom": _attention_from,
    "AttentionPacked": _attention,
    "AttentionRows": lambda node, values: Dispatched(ATTENTION_ROWS, node.arg),
    "AttentionStep": lambda node, values: Dispatched(ATTENTION_STEP, node.arg),
    "Chosen": lambda node, values: Dispatched(EXPERTS_CHOSEN, node.arg),
    "Combined": mixtures.combined,
    "Depthwise": mixtures.depthwise,
    "Embedding": lambda node, values: Dispatched(QUANTIZED_ROWS, node.arg),
    "Experts": mixtures.experts,
    "ExpertsAlone": mixtures.alone,
    "GatedDelta": mixtures.delta,
    "Gelu": lambda node, values: nn.gelu,
    "GeluApprox": lambda node, values: nn.gelu_approx,
    "Heads": mixtures.heads,
    "Latent": lambda node, values: Dispatched(LATENT_ATTENTION, node.arg),
    "Products": lambda node, values: Dispatched(FUSED_PRODUCTS, node.arg),
    "Rotary": lambda node, values: Dispatched(ROTARY, node.arg),
    "Shown": _shown,
    "Silu": lambda node, values: nn.silu,
    "Swiglu": lambda node, values: swiglu,
}
