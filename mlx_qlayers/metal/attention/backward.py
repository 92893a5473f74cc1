"""Launches the kernels of the gradients of attention."""

from __future__ import annotations

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.legacy import PreparedLaunch
from .forward import LOG2E, Arrays, Call, nothing
from .layout import PARAMETERS, Layout, memory

# What lowers the scores of a query that sees no key, as attention_tile.metal has it.
_BLANK = 1e38

_RULE = ("T", "M", "D", "DV", "MASK", "SOFTCAP")
_OF_QUERIES = ("q", "k", "v", "mask", "out", "d_out", "norms", "sizes", "numbers")
_QUERIES = Kernel(
    "attention_backward_queries",
    "attention/backward.metal",
    inputs=_OF_QUERIES,
    outputs=("d_q", "delta"),
    template=(*_RULE, *PARAMETERS),
    threadgroup_memory=lambda **values: memory("queries", values),
    large=True,
    ensure_row_contiguous=False,
)
_MASK = Kernel(
    "attention_backward_mask",
    "attention/backward.metal",
    inputs=_OF_QUERIES,
    outputs=("d_scores",),
    template=(*_RULE, *PARAMETERS),
    threadgroup_memory=lambda **values: memory("queries", values),
    large=True,
    ensure_row_contiguous=False,
)
_KEYS = Kernel(
    "attention_backward_keys",
    "attention/backward_keys.metal",
    inputs=("q", "k", "v", "mask", "d_out", "norms", "delta", "average", "sizes", "numbers"),
    outputs=("d_k", "d_v"),
    template=(*_RULE, "AVERAGE", "ROLES", *PARAMETERS),
    threadgroup_memory=lambda **values: memory("keys", values),
    large=True,
    ensure_row_contiguous=False,
)


def gradient_queries(
    call: Call,
    arrays: Arrays,
    out: mx.array,
    norms: mx.array,
    d_out: mx.array,
    chosen: Layout | None = None,
) -> tuple[mx.array, mx.array]:
    """The gradient of ``q``, and what those of ``k``, ``v`` and ``sinks`` need of it.

    Args:
        call: what is known of the arrays.
        arrays: what attention was computed of.
        out: what :func:`attention_forward` gave for them.
        norms: and beside it.
        d_out: the cotangent of ``out``, in the dtype of ``q``.
        chosen: how to spread the work, if not as the table says.

    Returns:
        (B, H, L, D) in the dtype of ``q``; and (B, H, L) float32, the sums of ``out * d_out``.
    """

    def make(chosen: Layout | None) -> PreparedLaunch:
        return call.prepare(
            _QUERIES,
            chosen or call.layout("queries"),
            (call.queries, call.heads),
            [(call.batch, call.queries, call.heads, call.width), norms.shape[:3]],
        )

    d_q, delta = call.launch(_QUERIES, arrays, (out, d_out, norms), make, chosen)
    return d_q.swapaxes(1, 2), delta


def gradient_mask(
    call: Call,
    arrays: Arrays,
    out: mx.array,
    norms: mx.array,
    d_out: mx.array,
    shape: tuple[int, ...],
    chosen: Layout | None = None,
) -> mx.array:
    """The gradient of an additive mask of this shape in float32; arguments as before."""

    def make(chosen: Layout | None) -> PreparedLaunch:
        return call.prepare(
            _MASK,
            chosen or call.layout("queries"),
            (call.queries, call.heads),
            [(call.batch, call.heads, call.queries, call.keys)],
            init_value=0,
        )

    (d_scores,) = call.launch(_MASK, arrays, (out, d_out, norms), make, chosen)
    shared = [axis for axis, n in enumerate((1,) * (4 - len(shape)) + shape) if n == 1]
    return d_scores.sum(axis=shared, keepdims=True).reshape(shape)


def gradient_keys_and_values(
    call: Call,
    arrays: Arrays,
    norms: mx.array,
    delta: mx.array,
    d_out: mx.array,
    chosen: Layout | None = None,
) -> tuple[mx.array, mx.array]:
    """The gradients of ``k`` and ``v``; ``delta`` is what :func:`gradient_queries` gave.

    Returns:
        (B, Hkv, S, D) and (B, Hkv, S, Dv) in the dtype of ``q``.
    """

    def make(chosen: Layout | None) -> PreparedLaunch:
        layout = chosen or call.layout("keys")
        return call.prepare(
            _KEYS,
            layout,
            (call.keys, call.kv_heads),
            [
                (call.batch, call.keys, call.kv_heads, call.width),
                (call.batch, call.keys, call.kv_heads, call.width_v),
            ],
            AVERAGE=call.average,
            ROLES=layout.roles,
        )

    others = d_out, norms, delta, _average(call, norms, d_out)
    d_k, d_v = call.launch(_KEYS, arrays, others, make, chosen)
    return d_k.swapaxes(1, 2), d_v.swapaxes(1, 2)


def _average(call: Call, norms: mx.array, d_out: mx.array) -> mx.array:
    """What each value gets of the queries that see no key: (B, Hkv, Dv)."""
    if not call.average:
        return nothing()
    share = mx.where(norms[..., :1] == _BLANK, 1 / call.keys, 0.0)
    shared = (d_out.astype(mx.float32) * share).sum(axis=2)
    return shared.reshape(call.batch, call.kv_heads, -1, call.width_v).sum(axis=2)


def gradient_sinks(sinks: mx.array, norms: mx.array, delta: mx.array) -> mx.array:
    """The gradient of ``sinks``, (H,) in their dtype."""
    top, total = norms[..., 0], norms[..., 1]
    weight = mx.power(2, LOG2E * sinks.astype(mx.float32)[:, None] - top) / total
    return -(weight * delta).sum(axis=(0, 2)).astype(sinks.dtype)
