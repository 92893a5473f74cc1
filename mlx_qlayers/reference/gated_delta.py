"""The gated delta rule in MLX's operators, token after token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def gated_delta(*arrays: Any, norms: tuple[float, ...] = ()) -> list[mx.array]:
    """As :func:`.ops.gated_delta.gated_delta`, which describes the arrays; a mask may be None."""
    q, k, v, g, beta, state, mask = arrays
    if norms:
        epsilon, of_queries, of_keys = norms
        q = of_queries * mx.fast.rms_norm(q, None, epsilon)
        k = of_keys * mx.fast.rms_norm(k, None, epsilon)
    shared = v.shape[2] // q.shape[2]
    q, k = (mx.repeat(x, shared, axis=2).astype(mx.float32) for x in (q, k))
    g, beta, rows = g.astype(mx.float32), beta.astype(mx.float32), []
    for t in range(v.shape[1]):
        before, key = state, k[:, t, :, None]
        state = state * (g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None])
        change = (v[:, t] - (state * key).sum(axis=-1)) * beta[:, t, :, None]
        state = state + key * change[..., None]
        rows.append((state * q[:, t, :, None]).sum(axis=-1).astype(v.dtype))
        if mask is not None:
            state = mx.where(mask[:, t, None, None, None], state, before)
    return [mx.stack(rows, axis=1) if rows else mx.zeros_like(v), state]
