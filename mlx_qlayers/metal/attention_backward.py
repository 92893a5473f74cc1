"""Launches the kernels of the gradients of attention."""

from __future__ import annotations

import mlx.core as mx

from ..runtime.kernel import Kernel
from .attention import LAYOUT, RULE, Job, Layout, Scores, nothing

_SHAPE = ("T", "M", "D", "DV", *RULE)
_OF_QUERIES = ("q", "k", "v", "mask", "out", "d_out", "lse", "sizes", "numbers")
_QUERIES = Kernel(
    "attention_backward_queries",
    "attention_backward.metal",
    inputs=_OF_QUERIES,
    outputs=("d_q", "delta"),
    template=(*_SHAPE, *LAYOUT),
    large=True,
    ensure_row_contiguous=False,
)
_MASK = Kernel(
    "attention_backward_mask",
    "attention_backward.metal",
    inputs=_OF_QUERIES,
    outputs=("d_scores",),
    template=(*_SHAPE, *LAYOUT),
    large=True,
    ensure_row_contiguous=False,
)
_KEYS = Kernel(
    "attention_backward_keys",
    "attention_backward.metal",
    inputs=("q", "k", "v", "mask", "d_out", "lse", "delta", "average", "sizes", "numbers"),
    outputs=("d_k", "d_v"),
    template=(*_SHAPE, "AVERAGE", "ROLES", *LAYOUT),
    large=True,
    ensure_row_contiguous=False,
)


def d_queries(q, k, v, mask, sinks, out, lse, d_out, scores: Scores, layout: Layout):
    job = Job(q, k, v, mask, sinks, scores)
    batch, heads, queries, width = q.shape
    d_q, delta = _QUERIES(
        [q, k, v, job.mask, out, d_out, lse, job.sizes, job.numbers],
        template={**job.template, **layout.template()},
        grid=(layout.threads * -(-queries // layout.rows), heads, batch),
        threadgroup=(layout.threads, 1, 1),
        output_shapes=[(batch, queries, heads, width), (batch, heads, queries)],
    )
    return d_q.swapaxes(1, 2), delta


def d_scores(q, k, v, mask, sinks, out, lse, d_out, scores: Scores, layout: Layout):
    job = Job(q, k, v, mask, sinks, scores)
    batch, heads, queries, width = q.shape
    (d,) = _MASK(
        [q, k, v, job.mask, out, d_out, lse, job.sizes, job.numbers],
        template={**job.template, **layout.template()},
        grid=(layout.threads * -(-queries // layout.rows), heads, batch),
        threadgroup=(layout.threads, 1, 1),
        output_shapes=[(batch, heads, queries, k.shape[2])],
        init_value=0,
    )
    return d


def d_keys_and_values(q, k, v, mask, sinks, lse, delta, d_out, scores: Scores, layout: Layout, roles: int):
    job = Job(q, k, v, mask, sinks, scores)
    batch, heads, queries, width = q.shape
    kv_heads, keys, width_v = v.shape[1:]
    average = nothing()
    if job.average:
        # Each key has an equal part of what the queries that see none hand back.
        blank = mx.where(lse == 1e38, 1 / keys, 0).reshape(batch, kv_heads, -1, 1)
        average = (d_out.astype(mx.float32).reshape(batch, kv_heads, -1, width_v) * blank).sum(axis=2)
    rows = layout.rows // roles
    d_k, d_v = _KEYS(
        [q, k, v, job.mask, d_out, lse, delta, average, job.sizes, job.numbers],
        template={**job.template, "AVERAGE": job.average, "ROLES": roles, **layout.template()},
        grid=(layout.threads * -(-keys // rows), kv_heads, batch),
        threadgroup=(layout.threads, 1, 1),
        output_shapes=[(batch, keys, kv_heads, width), (batch, keys, kv_heads, width_v)],
    )
    return d_k.swapaxes(1, 2), d_v.swapaxes(1, 2)
