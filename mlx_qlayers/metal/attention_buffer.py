"""Launches attention to the buffer of a cache of which the number of keys is an array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import e, log2
from struct import pack, unpack

import mlx.core as mx

from ..runtime.kernel import Kernel
from ..runtime.launch import TemplateValue
from .attention_decode import added_up

# Keys that one threadgroup takes.
MAX_KEYS = 2048
_INPUTS = ("q", "k", "v", "k_buffer", "v_buffer", "length", "mask", "options")


def _memory(*, Dv: int, simds: int, **_: object) -> int:
    return 4 * simds * (Dv + 2)


@cache
def _kernel(masked: bool) -> Kernel:
    return Kernel(
        "attention_in_buffer" + "_masked" * masked,
        "attention_buffer.metal",
        function="attention_in_buffer",
        inputs=tuple(name for name in _INPUTS if masked or name != "mask"),
        omitted=() if masked else ("mask",),
        outputs=("out",),
        template=("T", "D", "Dv", "share", "masked", "simds", "ahead", "P", "split"),
        threadgroup_memory=_memory,
        large=True,
    )


@dataclass(frozen=True)
class InBuffer:
    """How attention to a buffer is spread over threads.

    Attributes:
        simds: SIMD groups of a threadgroup, which take the keys in turn.
        ahead: keys that a lane reads at once.
        stretches: threadgroups among which the keys of a row are divided.
    """

    simds: int
    ahead: int
    stretches: int = 1


def configure(size: int, v_width: int) -> InBuffer:
    """The configuration for a buffer of so many keys and the width of a value."""
    stretches = -(-size // MAX_KEYS)
    return InBuffer(16 if v_width > 128 or size <= 512 else 32, 4, stretches)


def attention_in_buffer(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_buffer: mx.array,
    v_buffer: mx.array,
    length: mx.array,
    *,
    scale: float,
    mask: mx.array | None,
    config: InBuffer,
) -> mx.array:
    """Attention of new tokens to what a buffer holds and to themselves, in one launch or two.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16; D and Dv multiples of 8 up to 256.
        k: (B, Hkv, L, D), the keys of the new tokens, in the dtype of ``q``.
        v: (B, Hkv, L, Dv).
        k_buffer: (B, Hkv, S, D).
        v_buffer: (B, Hkv, S, Dv).
        length: how many keys of the buffer count; int32, 0-d.
        scale: what the products are multiplied by.
        mask: booleans, four axes that broadcast to (B, H, L, S + L), or None. Column
            ``length + i`` is that of new token i.
        config: how to spread the work.

    Returns:
        (B, L, H * Dv) in the dtype of ``q``.
    """
    batch, heads, queries, width = q.shape
    kv_heads, size, v_width = v_buffer.shape[1:]
    steps = (0, 0, 0)
    arrays = [q, k, v, k_buffer, v_buffer, length]
    if mask is not None:
        if mask.shape[3] == 1:
            mask = mx.broadcast_to(mask, (*mask.shape[:3], size + queries))
        arrays.append(mask)
        steps = _steps(mask.shape)
    arrays.append(_options(queries, size, scale, *steps))
    split, threads = config.stretches > 1, 32 * config.simds
    template: dict[str, TemplateValue] = {
        "T": q.dtype,
        "D": width,
        "Dv": v_width,
        "share": heads // kv_heads,
        "masked": mask is not None,
        "simds": config.simds,
        "ahead": config.ahead,
        "P": mx.float32 if split else q.dtype,
        "split": split,
    }
    shape = (batch, queries, heads * v_width)
    parts = (batch, queries, heads, config.stretches, v_width + 2)
    (out,) = _kernel(mask is not None)(
        arrays,
        template=template,
        grid=(threads * config.stretches, heads, batch * queries),
        threadgroup=(threads, 1, 1),
        output_shapes=[parts if split else shape],
    )
    if split:
        out = added_up(out, q.dtype, shape)
    return out


def _steps(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """From one sequence, head and row of a mask to the next; 0 along an axis that broadcasts."""
    batch, heads, queries, keys = shape
    own = (heads * queries * keys, queries * keys, keys)
    b, h, r = (step if n > 1 else 0 for n, step in zip((batch, heads, queries), own, strict=True))
    return b, h, r


@lru_cache(maxsize=256)
def _options(queries: int, size: int, scale: float, *steps: int) -> mx.array:
    (bits,) = unpack("i", pack("f", scale * log2(e)))
    return mx.array([queries, size, bits, *steps], mx.int32)
