"""Launches a step of decoding: rotary embedding, new rows of the cache's buffers, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import e, log2
from struct import pack, unpack
from typing import Any

import mlx.core as mx

from ...options import Rotation
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.spec import Spec
from ..rotary.launch import rates, two_floats
from .decode import attention_combine
from .layout import rounded

_INPUTS = ("q", "k", "v", "k_buffer", "v_buffer", "positions", "mask", "freqs", "options")
# Keys of a buffer that one threadgroup takes, and among how many more are divided.
_UNSPLIT_KEYS, _SPLITS = 1024, 4


def _memory(*, T: mx.Dtype, D: int, Dv: int, simds: int, **_: object) -> int:
    return 2 * D * T.size + 4 * simds * (Dv + 2)


def _registers(*, T: mx.Dtype, ahead: int, **_: object) -> int:
    """Words of the arrays of a thread: keys and values on their way, scores, query and sums."""
    return ahead * (4 * T.size + 1) + 8 + 8 + 10


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
        registers=_registers,
        large=True,
    )


@dataclass(frozen=True)
class Step:
    """How a step is spread over threads.

    Attributes:
        simds: SIMD groups of a threadgroup, which divide the keys.
        ahead: keys that a lane reads at once.
        splits: threadgroups among which the keys of a head are divided.
    """

    simds: int
    ahead: int
    splits: int = 1


def configure(device: str, dtype: mx.Dtype, size: int) -> Step:
    """The configuration for buffers of so many keys, on ``"metal"``, ``"cuda"`` or ``"host"``."""
    # Four keys of float32 ahead take more registers than M1 and M2 have for 16 SIMD groups.
    ahead = 2 if device == "metal" and dtype == mx.float32 else 4
    return Step(16, ahead, 1 if size <= _UNSPLIT_KEYS else _SPLITS)


def question(
    q: Spec, k_buffer: Spec, v_width: int
) -> tuple[mx.Dtype, int, int, int, int, int, int]:
    """What is asked about a call: dtype, B, H, Hkv, S, D, Dv."""
    batch, kv_heads, size, width = k_buffer.shape
    return q.dtype, batch, q.shape[2] // width, kv_heads, rounded(size), width, v_width


def attention_step(
    arrays: Sequence[Any], scale: float, rotation: Rotation, config: Step
) -> Callable[..., list[mx.array]]:
    """A step of decoding, in one launch or two.

    Args:
        arrays: specs of q, k, v, k_buffer, v_buffer, positions, freqs and mask, as the operation of
            this name takes them; D and Dv multiples of 8 up to 256.
        scale: what the products of queries and keys are multiplied by.
        rotation: how queries and keys are turned.
        config: how to spread the work.

    Returns:
        A function of these arrays, which gives (B, 1, H * Dv), and the buffers with the token's key
        and value, and zeros behind them.
    """
    *always, freqs, mask = arrays
    q, _, _, k_buffer, v_buffer, _ = always
    batch, kv_heads, size, width = k_buffer.shape
    heads, v_width = q.shape[2] // width, v_buffer.shape[3]
    steps = (0, 0)
    if mask is not None:
        of_head, of_sequence = mask.shape[3], mask.shape[1] * mask.shape[3]
        steps = (of_sequence * (mask.shape[0] > 1), of_head * (mask.shape[1] > 1))
    turning = *two_floats(rotation.scale), 0.0, 0.0, *rates(rotation)
    bits = unpack(f"{1 + len(turning)}i", pack(f"{1 + len(turning)}f", scale * log2(e), *turning))
    options = mx.array([size, bits[0], *steps, *bits[1:]], mx.int32)
    kernel, split = _kernel(mask is not None, freqs is not None), config.splits > 1
    values: tuple[TemplateValue, ...] = (
        *(q.dtype, width, v_width, heads // kv_heads, mask is not None, rotation.dims),
        *(rotation.traditional, freqs is not None, config.simds, config.ahead),
        *(mx.float32 if split else q.dtype, split),
    )
    shape, parts = (batch, 1, heads * v_width), (batch, 1, heads, config.splits, v_width + 2)
    optional = [] if mask is None else [mask]
    optional += [] if freqs is None else [Spec(freqs.shape, mx.float32)]
    launch = kernel.bind(
        [*always, *optional, Spec.of(options)],
        template=dict(zip(kernel.template, values, strict=True)),
        grid=(32 * config.simds * config.splits, heads, batch),
        threadgroup=(32 * config.simds, 1, 1),
        output_shapes=[parts if split else shape, k_buffer.shape, v_buffer.shape],
    )
    combine = attention_combine(parts, q.dtype, None, shape) if split else None

    def run(*arrays: mx.array) -> list[mx.array]:
        given = list(arrays[:6])
        if mask is not None:
            given.append(arrays[7])
        if freqs is not None:
            given.append(arrays[6].astype(mx.float32))
        given.append(options)
        outputs = launch(given)
        if combine is not None:
            outputs[:1] = combine(outputs[:1])
        return outputs

    return run
