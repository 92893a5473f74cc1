"""Launches a step of decoding: rotary embedding, attention to a cache and its append buffer.

A step has one token of each sequence or several, whose queries a launch takes together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ...options import UNPACKED, Packing, Rotation, StepCall
from ...runtime.devices import device_of
from ...runtime.devices.record import MAX_THREADGROUP_MEMORY, most_threads
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.spec import Spec
from ..common.kernels import LOG2E, large_kernel, of_kernel, without, words
from ..record import rounded
from ..rotary.launch import rates, two_floats
from . import decode
from .decode import attention_combine

# Splits and columns up to which the last threadgroup adds up what the others wrote.
_MOST_JOINED, _MOST_COLUMNS = 64, 2
# Words of the arrays of a thread, up to which it may read two blocks at once.
_MOST_WORDS = 176
# Threadgroups that copy the append buffer of a key head.
_COPYING = 16


def _memory(
    *,
    T: mx.Dtype,
    D: int,
    Dv: int,
    bits: int,
    columns: int,
    simds: int,
    blocks: int,
    slice: int,
    teams: int = 1,
    tokens: int = 1,
    joined: bool = False,
    normed: bool = True,
    **_: object,
) -> int:
    """The bytes of threadgroup memory: rows of q, keys and p with their padding, and sums."""
    chunk, every = 4 * _run(T, bits), simds * teams
    width = -(-D // chunk) * chunk
    queries = (8 * columns + tokens) * (width + 16 // T.size)
    weights = 16 * blocks * every * (8 * columns + (8 if columns % 2 == 0 else 0))
    taken = 32 * simds * slice * columns * (teams - 1) or 4
    sums = 32 * (every + teams + tokens) * columns
    return (
        (queries + weights + (tokens * Dv if bits else 1)) * T.size
        + sums
        + taken
        + (32 * columns * _MOST_JOINED * joined or 4)
        + 4 * ((8 * columns + tokens) * normed + 1)
    )


def _run(dtype: mx.Dtype, bits: int) -> int:
    """Neighbouring elements of a key that a lane reads at once."""
    return 16 if bits else 16 // dtype.size


def _registers(*, T: mx.Dtype, bits: int, masked: bool, **values: Any) -> int:
    """Words of the arrays of a thread: those of decoding over such a cache."""
    seen = decode._BOOLEAN if masked else decode._ALL
    return decode._registers(T=T, bits=bits, seen=seen, run=_run(T, bits), **values)


_KERNEL = large_kernel(
    "attention_step", "attention/step.metal", threadgroup_memory=_memory, registers=_registers
)


@cache
def _kernel(
    packed: bool,
    masked: bool,
    listed: bool,
    sinking: bool = False,
    normed: bool = False,
    joined: bool = False,
) -> Kernel:
    there = {"mask": masked, "freqs": listed, "sinks": sinking}
    there |= {"q_norm": normed, "k_norm": normed, "semaphores": joined, "parts": joined}
    there |= dict.fromkeys(("k_scales", "k_biases", "v_scales", "v_biases"), packed)
    flags = {"_packed": packed, "_masked": masked, "_listed": listed}
    flags |= {"_sinks": sinking, "_normed": normed, "_joined": joined}
    name = "attention_step" + "".join(word for word, given in flags.items() if given)
    return without(_KERNEL, tuple(each for each, given in there.items() if not given), name)


@dataclass(frozen=True)
class Split(decode.Spread):
    """How a step is spread over threads."""

    splits: int = 0  # threadgroups for the keys of a cache; 0 if one takes the append buffer too
    append_splits: int = 1  # threadgroups among which those of the append buffer are
    resident: int = 0  # as in :class:`~.decode.Decode`
    teams: int = 1  # teams of a threadgroup, which share its keys

    @property
    def tile(self) -> int:
        """Keys that a threadgroup takes at once."""
        return 16 * self.blocks * self.simds * self.teams

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simds * self.teams


class Heads(NamedTuple):
    """The heads of a cache, by the names of the kernel's template."""

    T: mx.Dtype
    D: int
    Dv: int
    bits: int = 0  # the most of packed keys and values
    tokens: int = 1  # of each sequence

    def memory(self, config: Split) -> int:
        """Bytes of threadgroup memory that a configuration takes."""
        return _memory(**self._asdict(), joined=True, **asdict(config))

    def words(self, config: Split) -> int:
        """Words of the arrays of a thread, with a mask."""
        return _registers(**self._asdict(), masked=True, **asdict(config))

    def have_registers(self, config: Split) -> bool:
        """Whether M1 and M2 have registers for a configuration."""
        return config.threads <= most_threads(self.words(config))

    def fit(self, config: Split, device: str) -> bool:
        """Whether sums stay in registers, and rows in threadgroup memory."""
        if config.columns * config.slice > 128 or self.memory(config) > MAX_THREADGROUP_MEMORY:
            return False
        return device_of(device).spills or self.have_registers(config)


def unsplit(device: str, share: int, heads: Heads) -> Split:
    """The configuration where a threadgroup takes all keys of a head, for ``share`` heads of q."""
    wide = heads.Dv > 128 or (heads.Dv >= 96 and device_of(device).spills)
    slice = decode._PACKED_SLICE if heads.bits else 32 if wide else 16
    most = max(1, min(-(-share // 8), 8))
    spread = [Split(columns, -(-heads.Dv // slice), 1, slice) for columns in range(most, 0, -1)]
    return next((config for config in spread if heads.fit(config, device)), spread[-1])


@cache  # asked for every token
def covers(share: int, heads: Heads, few_registers: bool) -> bool:
    """Whether there is threadgroup memory for such heads, and registers on M1 and M2."""
    config = unsplit("metal", share, heads)
    if heads.memory(config) > MAX_THREADGROUP_MEMORY:
        return False
    return not few_registers or heads.have_registers(config)


def key_of(q: Spec, k_cache: Spec, v_width: int, packing: Packing = UNPACKED) -> tuple[Any, ...]:
    """The key of a call: dtype, B, H, Hkv, S, D, Dv, group size and most bits of packed ones, L."""
    (batch, kv_heads, size, width), (_, tokens, of_heads) = k_cache.shape, q.shape
    shape = batch, of_heads // width, kv_heads, rounded(size), width, v_width
    return q.dtype, *shape, packing.group_size, packing.widest, tokens


def _options(
    sizes: tuple[int, ...], mask: Spec | None, scale: float, rotation: Rotation, epsilon: float
) -> mx.array:
    """Sizes, the steps of a mask from one sequence and head to the next, and floats as words."""
    steps = 0, 0
    if mask is not None:
        of_head, of_sequence = mask.shape[3], mask.shape[1] * mask.shape[3]
        steps = (of_sequence * (mask.shape[0] > 1), of_head * (mask.shape[1] > 1))
    rotates_by = *two_floats(rotation.scale), 0.0, 0.0, *rates(rotation)
    # The number with which mx.quantize begins a group's maximum.
    on_gpu = mx.default_device().type == mx.gpu
    least = 0.0 if on_gpu else -float(mx.finfo(mx.float32).max)
    floats = words(least, epsilon, *rotates_by)
    return mx.array([*sizes, *words(scale * LOG2E), *steps, *floats], mx.int32)


def _values(
    call: StepCall, rotation: Rotation, config: Split, split: bool, joined: bool
) -> dict[str, TemplateValue]:
    """Those of the template's parameters."""
    dtype, (group_size, bits, v_bits) = call.q.dtype, call.packing
    values = asdict(config) | {"T": dtype, "K": call.k_append.dtype}
    values |= {"D": call.width, "Dv": call.v_width}
    values |= {"group_size": group_size or 1, "bits": bits, "bits_v": v_bits}
    values |= {"masked": call.mask is not None}
    values |= {"dims": rotation.dims, "traditional": rotation.traditional}
    values |= {"listed": call.freqs is not None, "sinking": call.sinks is not None}
    values |= {"normed": call.q_norm is not None, "tokens": call.q.shape[1]}
    values |= {"split": split, "joined": joined}
    parts = mx.float32 if split and not joined else dtype
    return values | {"P": parts, "RESIDENT": config.resident}


def attention_step(
    arrays: Sequence[Any], scale: float, rotation: Rotation, config: Split, epsilon: float = 0.0
) -> Callable[..., list[mx.array]]:
    """Binds a step of decoding, in one launch or two.

    ``arrays`` are specs of q, k, v, k_cache, v_cache, k_append, v_append, positions, freqs, mask,
    sinks, q_norm, k_norm and maybe semaphores, which make it one launch on NVIDIA GPUs. The launch
    gives (B, L, H * Dv) and the append buffers with the tokens' keys and values, zeros behind them.
    """
    call = StepCall.of(arrays)
    (q, appended, packed), v_width = (call.q, call.k_append, call.packing[1] > 0), call.v_width
    count = 8 + 4 * packed  # arrays that there always are
    config = config.wide(call.packing.v_bits, v_width)
    batch, kv_heads, size, _ = call.k_cache[0].shape
    heads, tokens = q.shape[2] // call.width, q.shape[1]
    share, split = heads // kv_heads, config.splits > 0
    append_splits = config.append_splits if split else 1
    splits = config.splits + append_splits
    threads, blocks = config.threads, -(-share * tokens // (8 * config.columns))
    few = splits <= _MOST_JOINED and config.columns <= _MOST_COLUMNS
    semaphores = 0 if call.semaphores is None else call.semaphores.size
    joined = split and few and semaphores >= batch * kv_heads * blocks
    sizes = size, appended.shape[2], append_splits, splits, share
    options = _options(sizes, call.mask, scale, rotation, epsilon)
    there = [each is not None for each in (call.mask, call.freqs, call.sinks, call.q_norm)]
    kernel = _kernel(packed, *there, joined)
    shape = batch, tokens, heads * v_width
    parts = batch, tokens, heads, splits, v_width + 2
    # Arrays that may be left out, in the kernel's order: their place and dtype in the launch.
    kinds = {1: mx.bool_, 0: mx.float32, 2: q.dtype, 3: q.dtype, 4: q.dtype}
    optional = [(count + i, kind) for i, kind in kinds.items() if arrays[count + i] is not None]
    part_sizes = batch * tokens * heads * splits * (v_width + 8 // q.dtype.size)
    given = [Spec(arrays[i].shape, kind) for i, kind in optional]
    out = parts if split and not joined else shape
    launch = kernel.bind(
        [*arrays[:count], *given, Spec.of(options), *[call.semaphores] * joined],
        template=of_kernel(kernel, _values(call, rotation, config, split, joined)),
        grid=(threads * (splits + _COPYING), kv_heads * blocks, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[out, appended.shape, call.v_append.shape, *[(part_sizes,)] * joined],
    )
    combine = attention_combine(parts, q.dtype, None, shape) if split and not joined else None

    def run(*arrays: mx.array) -> list[mx.array]:
        given = [*arrays[:count]]
        for i, kind in optional:
            given.append(arrays[i].astype(kind))
        given += [options, *arrays[count + 5 : count + 5 + joined]]
        outputs = launch(given)[:3]
        if combine is not None:
            outputs[:1] = combine(outputs[:1])
        return outputs

    return run
