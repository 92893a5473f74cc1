"""Launches a step of decoding: rotary embedding, new rows of the cache's buffers, attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import e, log2
from struct import pack, unpack
from typing import Any

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ..rotary.launch import rates, two_floats
from .decode import added_up
from .layout import rounded

_INPUTS = ("q", "k", "v", "k_buffer", "v_buffer", "places", "mask", "freqs", "options")
# Keys of a buffer that one threadgroup takes, and among how many more are divided.
_ALONE, _STRETCHES = 1024, 4


def _memory(*, T: mx.Dtype, D: int, Dv: int, simds: int, **_: object) -> int:
    return 2 * D * T.size + 4 * simds * (Dv + 2)


@cache
def _kernel(masked: bool, listed: bool) -> Kernel:
    there = {"mask": masked, "freqs": listed}
    omitted = tuple(name for name, given in there.items() if not given)
    return Kernel(
        "attention_step" + "_masked" * masked + "_listed" * listed,
        "attention/step.metal",
        function="attention_step",
        inputs=tuple(name for name in _INPUTS if name not in omitted),
        omitted=omitted,
        outputs=("out", "k_out", "v_out"),
        template=(
            *("T", "D", "Dv", "share", "masked", "dims", "traditional", "listed"),
            *("simds", "ahead", "P", "split"),
        ),
        threadgroup_memory=_memory,
        large=True,
    )


@dataclass(frozen=True)
class Rotation:
    """How a rotary embedding turns, as ``mx.fast.rope`` takes it.

    Attributes:
        dims: leading elements of a head that are turned; even.
        traditional: turn neighbours, not elements half of ``dims`` apart.
        base: element i turns by ``base ** (-2 i / dims)`` a position; None with frequencies.
        scale: of positions.
    """

    dims: int
    traditional: bool = False
    base: float | None = 10000.0
    scale: float = 1.0


@dataclass(frozen=True)
class Step:
    """How a step is spread over threads.

    Attributes:
        simds: SIMD groups of a threadgroup, which take the keys in turn.
        ahead: keys that a lane reads at once.
        stretches: threadgroups among which the keys of a head are divided.
    """

    simds: int
    ahead: int
    stretches: int = 1


def configure(size: int) -> Step:
    """The configuration for buffers of so many keys."""
    return Step(16, 4, 1 if size <= _ALONE else _STRETCHES)


def question(q: mx.array, k_buffer: mx.array, v_width: int) -> tuple[Any, ...]:
    """What dispatch is asked about a call: the fields of its problem."""
    batch, kv_heads, size, width = k_buffer.shape
    return q.dtype, batch, q.shape[2] // width, kv_heads, rounded(size), width, v_width


def attention_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_buffer: mx.array,
    v_buffer: mx.array,
    places: mx.array,
    *,
    scale: float,
    rotation: Rotation,
    freqs: mx.array | None,
    mask: mx.array | None,
    config: Step,
) -> list[mx.array]:
    """A step of decoding, in one launch or two.

    Args:
        q: (B, 1, H * D) in float32, float16 or bfloat16; D and Dv multiples of 8 up to 256.
        k: (B, 1, Hkv * D) in the dtype of ``q``.
        v: (B, 1, Hkv * Dv).
        k_buffer: (B, Hkv, S, D).
        v_buffer: (B, Hkv, S, Dv).
        places: int32, 8 elements or more: how many keys of the buffers count, less than S; and
            the position of each sequence's token.
        scale: what the products of queries and keys are multiplied by.
        rotation: how queries and keys are turned.
        freqs: (dims / 2,) float32, the reciprocals of the frequencies, or None.
        mask: booleans, (B or 1, H or 1, 1, S), or None.
        config: how to spread the work.

    Returns:
        (B, 1, H * Dv), and the buffers with the token's key and value, and zeros behind them.
    """
    batch, kv_heads, size, width = k_buffer.shape
    heads, v_width = q.shape[2] // width, v_buffer.shape[3]
    arrays = [q, k, v, k_buffer, v_buffer, places]
    arrays += [a for a in (mask, freqs) if a is not None]
    steps = (0, 0)
    if mask is not None:
        of_head, of_sequence = mask.shape[3], mask.shape[1] * mask.shape[3]
        steps = (of_sequence * (mask.shape[0] > 1), of_head * (mask.shape[1] > 1))
    arrays.append(_options(size, scale, rotation, *steps))
    split, threads = config.stretches > 1, 32 * config.simds
    template: dict[str, TemplateValue] = {
        "T": q.dtype,
        "D": width,
        "Dv": v_width,
        "share": heads // kv_heads,
        "masked": mask is not None,
        "dims": rotation.dims,
        "traditional": rotation.traditional,
        "listed": freqs is not None,
        "simds": config.simds,
        "ahead": config.ahead,
        "P": mx.float32 if split else q.dtype,
        "split": split,
    }
    shape, parts = (batch, 1, heads * v_width), (batch, 1, heads, config.stretches, v_width + 2)
    out, *buffers = _kernel(mask is not None, freqs is not None)(
        arrays,
        template=template,
        grid=(threads * config.stretches, heads, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[parts if split else shape, k_buffer.shape, v_buffer.shape],
    )
    return [added_up(out, q.dtype, shape) if split else out, *buffers]


@lru_cache(maxsize=256)
def _options(size: int, scale: float, rotation: Rotation, *steps: int) -> mx.array:
    turning = [*two_floats(rotation.scale), 0.0, 0.0]
    turning += rates(rotation.dims, rotation.base, rotation.scale)
    bits = unpack(f"{1 + len(turning)}i", pack(f"{1 + len(turning)}f", scale * log2(e), *turning))
    return mx.array([size, bits[0], *steps, *bits[1:]], mx.int32)
