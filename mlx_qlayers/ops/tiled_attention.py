"""Attention of many queries by tiled kernels, with gradients for everything that has one."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from mlx_qlayers.metal import attention_backward as backward
from mlx_qlayers.metal.attention import Call, Scores, attention_forward


def tiled_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scores: Scores,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention by kernels; arguments as :func:`mlx_qlayers.attention` checked them.

    The gradient of an additive mask, the only one as large as the scores, is computed only where
    it is asked for: the mask passes an identity of its own first, see ``separate_gradients``.
    """
    dtype = mx.result_type(q, k, v)
    added = mask is not None and mask.dtype != mx.bool_
    # What the gradient of the mask needs, left by that of the rest, which comes before it.
    given: list[mx.array] = []

    def call_of(q: mx.array, k: mx.array, v: mx.array, *others: mx.array) -> Call:
        rest = list(others)
        return Call(
            q,
            k,
            v,
            rest.pop(0) if added else mask,
            rest.pop(0) if sinks is not None else None,
            scores,
        )

    @mx.custom_function
    def operator(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return attention_forward(call_of(*arrays))

    @operator.vjp
    def _(
        arrays: tuple[mx.array, ...],
        cotangents: tuple[mx.array, mx.array],
        outputs: tuple[mx.array, mx.array],
    ) -> tuple[mx.array, ...]:
        call, (out, lse), d_out = call_of(*arrays), outputs, cotangents[0]
        given[:] = [*arrays, out, lse, d_out]
        d_q, delta = backward.gradient_queries(call, out, lse, d_out)
        gradients: list[mx.array] = [
            d_q,
            *backward.gradient_keys_and_values(call, lse, delta, d_out),
        ]
        if added:
            gradients.append(mx.broadcast_to(mx.array(0, arrays[3].dtype), arrays[3].shape))
        if call.sinks is not None:
            gradients.append(backward.gradient_sinks(call.sinks, lse, delta))
        return tuple(gradients)

    @mx.custom_function
    def hold(mask: mx.array) -> mx.array:
        return mask

    @hold.vjp
    def _(mask: mx.array, zeros: mx.array, _: mx.array) -> mx.array:
        *arrays, out, lse, d_out = given
        gradient = backward.gradient_mask(call_of(*arrays), out, lse, d_out, mask.shape)
        return gradient.astype(mask.dtype)

    arrays = [a.astype(dtype) for a in (q, k, v)]
    if mask is not None and added:
        arrays.append(cast(mx.array, hold(mask)))
    if sinks is not None:
        arrays.append(sinks)
    out, _ = cast(tuple[mx.array, mx.array], operator(*arrays))
    return out
