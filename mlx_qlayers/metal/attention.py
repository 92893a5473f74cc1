"""Launches attention of many queries; attention_backward.py launches its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import e, log2
from typing import Any, cast

import mlx.core as mx

from ..runtime.backend import backend
from ..runtime.kernel import Kernel
from ..runtime.launch import TemplateValue
from ..tuning.lookup import found, rounded
from ..tuning.store import device_kind
from .attention_layout import PARAMETERS, Layout, layout, memory

# More queries or keys than there can be: positions are 32-bit numbers, and so are their sums.
FAR = 2**28
LOG2E = log2(e)
_NO_MASK, _BOOLEAN, _ADDED = range(3)

_FORWARD = Kernel(
    "attention_forward",
    "attention.metal",
    inputs=("q", "k", "v", "mask", "sinks", "mean", "sizes", "numbers"),
    outputs=("out", "norms"),
    template=("T", "M", "N", "D", "DV", "MASK", "SOFTCAP", "SINKS", "AVERAGE", *PARAMETERS),
    threadgroup_memory=lambda **values: memory("forward", values),
    large=True,
    ensure_row_contiguous=False,
)


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys.

    Attributes:
        scale: what they are multiplied by.
        causal: whether a query sees no key that comes after it.
        window: how many keys a query sees, itself included, or None.
        softcap: the bound of the scores, or None.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None


class Call:
    """The arguments of one call as the kernels want them.

    Args:
        q: queries (B, H, L, D).
        k: keys (B, Hkv, S, D), in the dtype of ``q``.
        v: values (B, Hkv, S, Dv), likewise.
        mask: booleans or numbers that broadcast to (B, H, L, S), or None.
        sinks: (H,) or None.
        scores: the other options.
    """

    def __init__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        mask: mx.array | None,
        sinks: mx.array | None,
        scores: Scores,
    ) -> None:
        self.q, self.k, self.v, self.sinks = q, k, v, sinks
        self.batch, self.heads, self.queries, self.width = q.shape
        _, self.kv_heads, self.keys, self.width_v = v.shape
        self.causal = scores.causal
        bounded = scores.causal or scores.window is not None
        # Some query may see no key, and then gets the mean of the values.
        self.average = sinks is None and (
            mask is not None or (bounded and self.queries > self.keys)
        )
        self.sizes = _integers(
            self.queries,
            self.keys,
            self.heads,
            self.heads // self.kv_heads,
            self.keys - self.queries if bounded else FAR,
            min(scores.window or 2 * FAR, 2 * FAR),
        )
        cap, scale = scores.softcap, scores.scale
        factors = (scale * LOG2E, 0.0) if cap is None else (scale / cap, cap * LOG2E)
        self.numbers = _floats(*factors, scale)
        self.mask = nothing()
        if mask is not None:
            # Its strides say how it repeats. One more axis keeps a small one from being `constant`.
            self.mask = mx.broadcast_to(mask, (8, self.batch, self.heads, self.queries, self.keys))
        kind = _NO_MASK if mask is None else _BOOLEAN if mask.dtype == mx.bool_ else _ADDED
        self.template: dict[str, TemplateValue] = {
            "T": q.dtype,
            "M": self.mask.dtype,
            "D": self.width,
            "DV": self.width_v,
            "MASK": kind,
            "SOFTCAP": cap is not None,
        }

    def layout(self, kernel: str) -> Layout:
        """How a kernel spreads the work of this call."""
        device, dtype = backend(), self.q.dtype
        if kernel == "forward" and device == device_kind():
            lengths = rounded(self.queries), rounded(self.keys)
            shape = (self.batch, self.heads, self.kv_heads, *lengths, self.width, self.width_v)
            if best := found("attention_forward", shape, dtype, self.causal):
                return cast(Layout, best.config)
        return layout(kernel, device, dtype, max(self.width, self.width_v))

    def threads(self, chosen: Layout, rows: int, heads: int) -> dict[str, Any]:
        """The launch of as many threadgroups as own so many rows of so many heads."""
        groups = -(-rows // chosen.rows)
        return {
            "grid": (chosen.threads * groups, heads, self.batch),
            "threadgroup": (chosen.threads, 1, 1),
        }


def attention_forward(call: Call, chosen: Layout | None = None) -> tuple[mx.array, mx.array]:
    """Attention, and the norms that its gradient needs.

    Returns:
        (B, H, L, Dv) in the dtype of ``q``, heads side by side in memory as the projection that
        comes next wants them; and (B, H, L, 2) float32, for each query the largest score in units
        of log2, and the sum of 2 to the scores less that.
    """
    chosen = chosen or call.layout("forward")
    sinks = nothing() if call.sinks is None else call.sinks
    mean = call.v.astype(mx.float32).mean(axis=2) if call.average else nothing()
    out, norms = _FORWARD(
        [call.q, call.k, call.v, call.mask, sinks, mean, call.sizes, call.numbers],
        template={
            **call.template,
            **chosen.template(),
            "N": sinks.dtype,
            "SINKS": call.sinks is not None,
            "AVERAGE": call.average,
        },
        output_shapes=[
            (call.batch, call.queries, call.heads, call.width_v),
            (call.batch, call.heads, call.queries, 2),
        ],
        **call.threads(chosen, call.queries, call.heads),
    )
    return out.swapaxes(1, 2), norms


@lru_cache(maxsize=1)
def nothing() -> mx.array:
    """What stands for an array that is not there."""
    return mx.zeros((1, 1, 1, 1, 8))


@lru_cache(maxsize=1024)
def _integers(*values: int) -> mx.array:
    return mx.array(values, mx.int32)


@lru_cache(maxsize=1024)
def _floats(*values: float) -> mx.array:
    return mx.array(values, mx.float32)
