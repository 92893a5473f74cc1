"""Launches attention of a few queries over a long cache, split over the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Self

import mlx.core as mx

from ...options import AttentionCall
from ...runtime.devices import device_of
from ...runtime.devices.record import MAX_THREADGROUP_MEMORY, most_threads
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound, Launching, TemplateValue
from ...runtime.program import CONSTANT_BELOW
from ...runtime.spec import Spec
from ..common.kernels import LOG2E, large_kernel, of_kernel, strided_kernel, without, words
from ..record import rounded

MAX_QUERIES = 8
_FIXED = 256  # keys of a split, where that depends on nothing
MAX_WIDTH = 256
BITS = (2, 3, 4, 8)

# The width of a slice of which a lane holds whole words of codes, however few bits these have.
_PACKED_SLICE = 64


def _memory(
    *, T: mx.Dtype, D: int, columns: int, simds: int, blocks: int, run: int, **_: object
) -> int:
    """The bytes of threadgroup memory: rows of q and of p with their padding, and sums."""
    parts = -(-D // (4 * run)) * run // 4
    queries = 8 * columns * (16 * parts + 16 // T.size)
    shares = 16 * blocks * simds * (8 * columns + (8 if columns % 2 == 0 else 0))
    return (queries + shares) * T.size + 32 * simds * columns


def _registers(
    *,
    T: mx.Dtype,
    D: int,
    bits: int,
    seen: int,
    columns: int,
    simds: int,
    blocks: int,
    slice: int,
    run: int,
    bits_v: int = 0,
    **_: object,
) -> int:
    """Words of the arrays of a thread: keys and values on their way, queries, sums and scores."""
    packed = bits > 0  # codes of fewer bits than 4 are held as those of 4
    width, width_v = ((max(n, 4) if packed else 8 * T.size) for n in (bits, bits_v or bits))
    steps, run_v = -(-D // (4 * run)), min(slice // 8, 8 if packed else 16 // T.size)
    keys = 2 * blocks * steps * (run * width // 32 + packed)
    values = simds * blocks * slice // (2 * run_v) * (run_v * width_v // 32 + packed)
    queries = columns * steps * run // 4
    kept = queries * T.size if queries <= 16 else T.size
    # Of each row the largest score, its sum, its position and where its mask is; of all, scores.
    rows = columns * (4 + 2 + 4 * (seen >= _BOOLEAN) + 4 * blocks)
    return keys + values + kept + rows + columns * slice // 4


_SPLIT = strided_kernel(
    "attention_decode", "attention/decode.metal", threadgroup_memory=_memory, registers=_registers
)
# With all that there may be: where threads run side by side, and one by one.
_WHOLE = _SPLIT, strided_kernel("attention_serial", "attention/serial_decode.metal")


@cache
def _kernel(
    serial: bool, packed: bool, masked: bool, sinking: bool, counted: bool = False
) -> Kernel:
    """A kernel that takes what there is: every array that is passed costs time at each launch."""
    whole, there = _WHOLE[serial], {"mask": masked, "sinks": sinking}
    there |= dict.fromkeys(("k_scales", "k_biases", "v_scales", "v_biases"), packed)
    lacking = [name for name, given in there.items() if not given]
    counts = "held" if serial else "starts"
    omitted = *lacking, *(f"{name}_strides" for name in lacking), *[counts] * (not counted)
    words = {"_packed": packed, "_masked": masked, "_sinks": sinking, "_counted": counted}
    return without(whole, omitted, whole.name + "".join(w for w, given in words.items() if given))


_COMBINE_SINKS = large_kernel(
    "attention_combine_sinks",
    "attention/combine.metal",
    function="attention_combine",
    threadgroup_memory=lambda Dv, simds, **_: 4 * simds * (-(-Dv // 32) * 32 + 1),
    registers=lambda Dv, **_: -(-Dv // 32),
)
COMBINE = without(_COMBINE_SINKS, ("sinks",), "attention_combine")


# The values of the kernel's `seen`.
_ALL, _CAUSAL, _BOOLEAN, _ADDITIVE = range(4)


@dataclass(frozen=True)
class Spread:
    """How attention to a cache is spread over threads."""

    columns: int  # eights of query rows, or of queries that share a key head, in a threadgroup
    simds: int  # SIMD groups of a threadgroup, or a team; each adds up its slice of the values
    blocks: int  # blocks of 16 keys that a SIMD group takes at once
    slice: int  # the width of a slice: 16, 32 or 64

    def wide(self, v_bits: int, v_width: int) -> Self:
        """The same with slices of packed values that are whole words: measured with 8 bits."""
        if self.slice >= _PACKED_SLICE or not 0 < v_bits < 8:
            return self
        return replace(self, slice=_PACKED_SLICE, simds=-(-v_width // _PACKED_SLICE))


@dataclass(frozen=True)
class Decode(Spread):
    """How attention of one token, or a few, is spread over threads."""

    run: int  # neighbouring elements of a key that a lane reads at once
    min_keys: int  # the fewest keys for which a threadgroup is started
    max_splits: int  # the most splits that the keys of a head are cut into
    combine: int = 16  # SIMD groups that add up the splits of a row
    resident: int = 0  # threadgroups of an NVIDIA multiprocessor by registers; 0: by its compiler

    @property
    def tile(self) -> int:
        """Keys that a threadgroup takes at once."""
        return 16 * self.blocks * self.simds

    def splits(self, keys: int) -> int:
        """Into how many splits the keys are cut; it depends on nothing else."""
        return max(1, min(keys // max(self.min_keys, self.tile), self.max_splits))


@dataclass(frozen=True)
class Fixed(Decode):
    """``min_keys`` in each split: sums depend on where keys are, not on how many there are."""

    least: int = 1  # with sinks 2: the sum of one split is rounded elsewhere

    def splits(self, keys: int) -> int:
        return max(self.least, -(-keys // self.min_keys))


@dataclass(frozen=True)
class Serial:
    """How decoding attention is spread where threads run one by one."""

    max_rows: int  # query rows of a thread
    block: int = 32  # keys that are made floats of at once


def key_of(call: AttentionCall) -> tuple[mx.Dtype, int, int, int, int, int, int, int]:
    """The key of a call: dtype, rows of a key head, D, Dv, most bits, Hkv, keys, B."""
    _, heads, queries, width = call.q.shape
    batch, kv_heads, keys, _ = call.k[0].shape
    rows, widths = heads // kv_heads * queries, (width, call.v_width)
    return call.q.dtype, rows, *widths, call.packing.widest, kv_heads, rounded(keys), batch


def unsplit(device: str, dtype: mx.Dtype, rows: int, width: int, v_width: int, bits: int) -> Decode:
    """The configuration where a threadgroup takes all keys of a head."""
    slice = _PACKED_SLICE if bits else 32 if v_width >= 96 else 16
    simds, run = -(-v_width // slice), 16 if bits else 16 // dtype.size

    def spread(columns: int, blocks: int = 1) -> Decode:
        return Decode(columns, simds, blocks, slice, run, min_keys=64, max_splits=1)

    def fits(config: Decode) -> bool:
        columns = config.columns
        memory = _memory(T=dtype, D=width, columns=columns, simds=simds, blocks=1, run=run)
        # The sums of all rows must stay in registers.
        if columns * slice > 256 or memory > MAX_THREADGROUP_MEMORY:
            return False
        return device_of(device).spills or _fits(config, dtype, width, bits)

    of_rows = [spread(columns) for columns in range(min(-(-rows // 8), 8), 1, -1)]
    config = next(filter(fits, of_rows), spread(1))
    wide = spread(1, blocks=2)
    return wide if bits and config.columns == 1 and fits(wide) else config


def fixed(device: str, call: AttentionCall) -> Fixed:
    """The configuration for any number of rows, eight in a threadgroup, and any batch."""
    dtype, _, width, v_width, bits, *_ = key_of(call)
    config = unsplit(device, dtype, 1, width, v_width, bits)
    keys, least = -(-_FIXED // config.tile) * config.tile, 1 if call.sinks is None else 2
    return Fixed(**asdict(config) | {"min_keys": keys, "least": least})


def fits_few_registers(call: AttentionCall) -> bool:
    """Whether M1 and M2 have registers for a call: not with wide heads."""
    dtype, rows, width, v_width, bits, *_ = key_of(call)
    config = unsplit("metal", dtype, rows, width, v_width, bits)
    return _fits(config, dtype, width, bits)


def _fits(config: Decode, dtype: mx.Dtype, width: int, bits: int) -> bool:
    """Whether they have them for a configuration, with a mask."""
    held = _registers(T=dtype, D=width, bits=bits, seen=_ADDITIVE, **asdict(config))
    return 32 * config.simds <= most_threads(held)


def attention_decode(
    call: AttentionCall, config: Decode | Serial, counted: bool = False
) -> Callable[..., list[mx.array]]:
    """Binds attention in one pass over keys and values: one launch, or two with several splits.

    The launch takes q, the arrays of k and of v, mask, sinks and, if ``counted``, int32: of
    :class:`Serial`, without a mask, the count of keys (1,), else with a mask the first key of
    each sequence (max(B, 8),). It gives (B, H, L, Dv), which is (B, L, H, Dv) in memory. D and Dv
    are multiples of 8 up to 256.
    """
    q, k, v, scores, mask, sinks = call
    parts, queries = [q, *k, *v], q.shape[2]
    # MLX would not pass these in device memory; what is behind their rows is not read.
    short = [i for i, a in enumerate(parts) if a.size < CONSTANT_BELOW]
    for i in short:
        parts[i] = Spec((*parts[i].shape[:3], parts[i].shape[3] + CONSTANT_BELOW), parts[i].dtype)
    # Its strides are what the kernel needs; an axis in front keeps it from being too small.
    mask_shape = (CONSTANT_BELOW, *q.shape[:3], k[0].shape[2])
    others = [] if mask is None else [Spec(mask_shape, mask.dtype)]
    others += [] if sinks is None else [sinks]
    of_batch = 1 if isinstance(config, Serial) else max(q.shape[0], CONSTANT_BELOW)
    others += [Spec((of_batch,), mx.int32)] * counted
    split = config.min_keys if isinstance(config, Fixed) else 0
    options, count = _options(scores.scale, scores.softcap, scores.window, split), len(parts)
    inputs = [*parts, *others, Spec.of(options)]
    launch, combine = _launches(inputs, call, config, counted)
    alone = mask is sinks is combine is None and not short
    if alone and (queries == 1 or isinstance(config, Serial)):
        bound = launch if queries == 1 else _swapped(launch)
        return Launching(bound, [*range(count), *[count + 2] * counted], [options])

    def run(*arrays: mx.array) -> list[mx.array]:
        given = list(arrays[:count])
        for i in short:
            given[i] = mx.pad(given[i], [(0, 0)] * 3 + [(0, CONSTANT_BELOW)])
        if mask is not None:
            given.append(mx.broadcast_to(arrays[count], mask_shape))
        if sinks is not None:
            given.append(mx.contiguous(arrays[count + 1]))  # the kernel does not take its stride
        given += [*arrays[count + 2 :], options]
        (out,) = launch(given)
        if combine is not None:
            (out,) = combine([out] if sinks is None else [out, arrays[count + 1]])
        return [out.swapaxes(1, 2) if queries > 1 else out]

    return run


def _swapped(launch: Bound) -> Bound:
    """A launch whose (B, L, H, Dv) are seen as (B, H, L, Dv)."""

    def run(inputs: list[mx.array]) -> list[mx.array]:
        return [y.swapaxes(1, 2) for y in launch(inputs)]

    vars(run).update(vars(launch), swaps=True)  # for lists of launches
    return run


def _launches(
    inputs: list[Spec], call: AttentionCall, config: Decode | Serial, counted: bool
) -> tuple[Bound, Bound | None]:
    """The launch of attention and, if there is more than one split, the one that adds them up."""
    q, k, v, scores, mask, sinks = call
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k[0].shape
    (group, bits, v_bits), v_width = call.packing, call.v_width
    rows = heads // kv_heads * queries
    seen = _CAUSAL if scores.causal and queries > 1 else _ALL
    if mask is not None:
        seen = _BOOLEAN if mask.dtype == mx.bool_ else _ADDITIVE
    of_mask = (v[-1] if mask is None else mask).dtype
    of_sinks = of_mask if sinks is None else sinks.dtype
    template: dict[str, TemplateValue] = {"T": q.dtype, "K": k[0].dtype, "S": k[-1].dtype}
    template |= {"M": of_mask, "N": of_sinks, "D": width, "Dv": v_width}
    template |= {"group": group, "bits": bits, "bits_v": v_bits}
    template |= {"seen": seen, "sinking": sinks is not None}
    template |= {"windowed": scores.window is not None, "capped": scores.softcap is not None}
    there = bits > 0, mask is not None, sinks is not None, counted
    kernel = _kernel(isinstance(config, Serial), *there)
    # One query a head needs no other order of the axes.
    shape = (batch, heads, 1, v_width) if queries == 1 else (batch, queries, heads, v_width)
    if isinstance(config, Serial):
        grid, threads, splits = (kv_heads, -(-rows // config.max_rows), batch), 1, 1
        template |= asdict(config)
    else:
        # Where no array hides keys too, what lies outside the window is not visited.
        if scores.window is not None and mask is None:
            keys = min(keys, scores.window + queries - 1)
        config = config.wide(v_bits, v_width)
        splits, threads = config.splits(keys), 32 * config.simds
        grid = splits * threads, kv_heads * -(-rows // (8 * config.columns)), batch
        template |= asdict(config)
        template |= {"P": q.dtype if splits == 1 else mx.float32, "split": splits > 1}
        template["RESIDENT"] = config.resident
    parts = batch, queries, heads, splits, v_width + 2
    launch = kernel.bind(
        inputs,
        template=of_kernel(kernel, template),
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=[shape if splits == 1 else parts],
    )
    if isinstance(config, Serial) or splits == 1:
        return launch, None
    return launch, attention_combine(parts, q.dtype, sinks, shape, config.combine)


def attention_combine(
    parts: tuple[int, ...],
    dtype: mx.Dtype,
    sinks: Spec | None,
    shape: tuple[int, ...],
    simds: int = Decode.combine,
) -> Bound:
    """Binds the sum of splits (B, L, H, splits, Dv + 2), and sinks: ``shape`` or (B, L, H, Dv)."""
    batch, queries, heads, _, width = parts
    kernel = COMBINE if sinks is None else _COMBINE_SINKS
    splits = Spec(parts, mx.float32)
    of_sinks = dtype if sinks is None else sinks.dtype
    values: dict[str, TemplateValue] = {"T": dtype, "N": of_sinks, "Dv": width - 2}
    return kernel.bind(
        [splits] if sinks is None else [splits, sinks],
        template=values | {"simds": simds, "sinking": sinks is not None},
        grid=(32 * simds, heads, batch * queries),
        threadgroup=(32 * simds, 1, 1),
        output_shapes=[shape],
    )


@lru_cache(maxsize=1024)  # one array for all lengths of a cache: a GPU need not fetch it anew
def _options(scale: float, softcap: float | None, window: int | None, split: int = 0) -> mx.array:
    """The scale, with softcap before it, and the cap, as bits; the window; keys of a split."""
    factors = (scale * LOG2E, 0) if softcap is None else (scale / softcap, softcap * LOG2E)
    return mx.array([*words(*factors), min(window or 0, 2**30), split], mx.int32)
