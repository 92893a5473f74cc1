"""Rotary embedding of queries and keys in MLX's own operator."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..options import Rotation


def rotary_embedding(rotation: Rotation) -> Callable[..., list[mx.array]]:
    """A function of q, k, offset and freqs (or None), as :func:`.ops.rotary.rotary_embedding`."""
    options = rotation._asdict()

    def run(q: mx.array, k: mx.array, offset: mx.array, freqs: mx.array | None) -> list[mx.array]:
        if freqs is not None:  # MLX's operator cannot be differentiated by them on a GPU
            freqs = mx.stop_gradient(freqs.astype(mx.float32))
        given = {**options, "offset": offset.astype(mx.int32), "freqs": freqs}
        heads = [x.transpose(0, 2, 1, 3) for x in (q, k)]
        return [mx.fast.rope(x, **given) if x.size and rotation.dims else x for x in heads]

    return run
