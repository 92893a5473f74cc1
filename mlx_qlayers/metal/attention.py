"""Launches the attention kernels for many queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2, e

import mlx.core as mx

from ..runtime.kernel import Kernel
from ..runtime.launch import TemplateValue

# Positions are 32-bit numbers, and so are sums of three of them.
FAR = 2**29
_LOG2E = log2(e)

# What all kernels of the family have in common.
RULE = ("MASK", "SOFTCAP")
LAYOUT = ("BLOCKS", "SIMDS", "SLICES", "TILE", "ALTERNATE", "AHEAD")

_FORWARD = Kernel(
    "attention_forward",
    "attention.metal",
    inputs=("q", "k", "v", "mask", "sinks", "mean", "sizes", "numbers"),
    outputs=("out", "lse"),
    template=("T", "M", "N", "D", "DV", *RULE, "SINKS", "AVERAGE", *LAYOUT),
    large=True,
    ensure_row_contiguous=False,
)


@dataclass(frozen=True)
class Layout:
    """How a kernel spreads its work; the head of its source says what the words mean.

    Attributes:
        blocks: blocks of 16 rows that a SIMD group owns.
        simds: SIMD groups of a threadgroup, a multiple of ``slices``.
        slices: SIMD groups that share their rows, each with its part of the columns.
        tile: rows of a tile in threadgroup memory, a multiple of 16.
        alternate: whether both tiles take turns in one place.
        ahead: whether the next tile is read from device memory while the last one is used.
    """

    blocks: int = 1
    simds: int = 4
    slices: int = 1
    tile: int = 32
    alternate: bool = False
    ahead: bool = False

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simds

    @property
    def rows(self) -> int:
        """Rows that a threadgroup owns."""
        return 16 * self.blocks * self.simds // self.slices

    def template(self) -> dict[str, TemplateValue]:
        """The values of the template parameters ``LAYOUT``."""
        return dict(zip(LAYOUT, (self.blocks, self.simds, self.slices, self.tile, self.alternate, self.ahead), strict=True))


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


class Job:
    """The arguments of one call as the kernels want them."""

    def __init__(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, sinks: mx.array | None, scores: Scores) -> None:
        batch, heads, queries, width = q.shape
        kv_heads, keys = k.shape[1:3]
        bounded = scores.causal or scores.window is not None
        reach = keys - queries if bounded else FAR
        window = 2 * FAR if scores.window is None else min(scores.window, 2 * FAR)
        self.sizes = _integers(queries, keys, heads, heads // kv_heads, reach, window)
        cap = scores.softcap
        self.numbers = _floats(*((scores.scale * _LOG2E, 0.0) if cap is None else (scores.scale / cap, cap * _LOG2E)), scores.scale)
        # Queries that see no key are possible, and get the mean of the values.
        self.average = sinks is None and (mask is not None or (bounded and queries > keys))
        # Its strides are what the kernel needs; an axis in front keeps it from being too small.
        self.mask = nothing() if mask is None else mx.broadcast_to(mask, (8, batch, heads, queries, keys))
        self.sinks = nothing() if sinks is None else sinks
        self.template: dict[str, TemplateValue] = {
            "T": q.dtype,
            "M": self.mask.dtype,
            "D": width,
            "DV": v.shape[3],
            "MASK": 0 if mask is None else 1 if mask.dtype == mx.bool_ else 2,
            "SOFTCAP": cap is not None,
        }


def forward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | None,
    sinks: mx.array | None,
    scores: Scores,
    layout: Layout,
) -> tuple[mx.array, mx.array]:
    """Attention, and for each query the log2 of the sum of 2 to the scores."""
    job = Job(q, k, v, mask, sinks, scores)
    batch, heads, queries, _ = q.shape
    mean = v.astype(mx.float32).mean(axis=2) if job.average else nothing()
    out, lse = _FORWARD(
        [q, k, v, job.mask, job.sinks, mean, job.sizes, job.numbers],
        template={**job.template, "N": job.sinks.dtype, "SINKS": sinks is not None, "AVERAGE": job.average, **layout.template()},
        grid=(layout.threads * -(-queries // layout.rows), heads, batch),
        threadgroup=(layout.threads, 1, 1),
        output_shapes=[(batch, queries, heads, v.shape[3]), (batch, heads, queries)],
    )
    # Heads lie side by side for the projection that comes next.
    return out.swapaxes(1, 2), lse


@lru_cache(maxsize=1)
def nothing() -> mx.array:
    """In place of an array that is not there."""
    return mx.zeros((1, 1, 1, 1, 8))


@lru_cache(maxsize=1024)
def _integers(*values: int) -> mx.array:
    return mx.array(values, mx.int32)


@lru_cache(maxsize=1024)
def _floats(*values: float) -> mx.array:
    return mx.array(values, mx.float32)
