"""Launches the rotary embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack, unpack

import mlx.core as mx

from ...options import Rotation
from ...runtime.kernel import Kernel
from ...runtime.launch import Launching
from ...runtime.program import CONSTANT_BELOW
from ...runtime.spec import Spec

_AT, _EACH = (Kernel(name, "rotary/rotary.metal") for name in ("rotary_at", "rotary_each"))


def rotary_embedding(
    q: Spec, k: Spec, offset: Spec, rotation: Rotation, share: int
) -> Callable[..., list[mx.array]]:
    """Binds the rotary embedding of queries and keys, ``share`` heads to a thread.

    The launch takes q, k, offset and, without a base, the reciprocals of frequencies (dims / 2,).
    """
    dims, listing = rotation.dims, rotation.base is None
    (batch, length, heads, width), kv_heads = q.shape, k.shape[2]
    sizes = mx.array([length, heads, kv_heads, width, dims, share], mx.int32)
    both = [*two_floats(rotation.scale), *rates(rotation)]
    pairs = mx.array(both + [0.0] * (CONSTANT_BELOW - len(both)), mx.float32)
    unused = mx.array([0.0] * CONSTANT_BELOW)
    listed = Spec((dims // 2,), mx.float32) if listing else unused
    launch = (_EACH if offset.ndim else _AT).bind(
        [q, k, Spec(offset.shape, mx.int32), listed, sizes, pairs],
        template={"T": q.dtype, "traditional": rotation.traditional, "listed": listing},
        grid=(dims // 2, -(-(heads + kv_heads) // share), batch * length),
        threadgroup=(min(dims // 2, 64), 1, 1),
        output_shapes=[(batch, heads, length, width), (batch, kv_heads, length, width)],
    )

    if offset.dtype == mx.int32 and not listing:
        return Launching(launch, (0, 1, 2), (unused, sizes, pairs))

    def run(
        q: mx.array, k: mx.array, offset: mx.array, freqs: mx.array | None = None
    ) -> list[mx.array]:
        listed = unused if freqs is None else freqs.astype(mx.float32)
        return launch([q, k, offset.astype(mx.int32), listed, sizes, pairs])

    return run


def rates(rotation: Rotation) -> list[float]:
    """The frequency of each pair as the sum of two floats; nothing if frequencies are listed."""
    dims, _, base, scale = rotation
    if base is None:
        return []
    return [part for i in range(0, dims, 2) for part in two_floats(scale * base ** (-i / dims))]


def two_floats(number: float) -> tuple[float, float]:
    """The float nearest to a number, and what it lacks."""
    (nearest,) = unpack("f", pack("f", number))
    return nearest, number - nearest
