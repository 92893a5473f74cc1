"""Launches attention of a few queries over a long cache, split over the keys."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from math import e, log2
from struct import pack, unpack
from typing import Any

import mlx.core as mx

from ...runtime.kernel import MAX_THREADGROUP_MEMORY, Kernel
from ...runtime.launch import TemplateValue
from ...runtime.legacy import PreparedLaunch
from ...runtime.program import CONSTANT_BELOW
from .layout import rounded

Packed = tuple[mx.array, mx.array, mx.array]

MAX_QUERIES = 8
MAX_WIDTH = 256
BITS = (4, 8)

_INPUTS = (
    *("q", "k", "k_scales", "k_biases", "v", "v_scales", "v_biases"),
    *("mask", "sinks", "options"),
)
_TYPES = ("T", "K", "S", "M", "N")
_SHAPES = ("D", "Dv", "group", "bits")
_OPTIONS = ("seen", "windowed", "capped", "sinking")
_LAYOUT = ("columns", "simds", "blocks", "slice", "run")


def _memory(
    *, T: mx.Dtype, D: int, columns: int, simds: int, blocks: int, run: int, **_: object
) -> int:
    """The bytes of threadgroup memory: rows of q and of p with their padding, and sums."""
    parts = -(-D // (4 * run)) * run // 4
    queries = 8 * columns * (16 * parts + 16 // T.size)
    shares = 16 * blocks * simds * (8 * columns + (8 if columns % 2 == 0 else 0))
    return (queries + shares) * T.size + 32 * simds * columns


@cache
def _kernel(serial: bool, packed: bool, masked: bool, sinking: bool) -> Kernel:
    """A kernel that takes what there is: every array that is passed costs time at each launch."""
    there = {"mask": masked, "sinks": sinking}
    there |= dict.fromkeys(("k_scales", "k_biases", "v_scales", "v_biases"), packed)
    omitted = tuple(name for name in _INPUTS if not there.get(name, True))
    function = "attention_serial" if serial else "attention_decode"
    own = ("most", "block") if serial else (*_LAYOUT, "P", "split", "RESIDENT")
    return Kernel(
        function + "_packed" * packed + "_masked" * masked + "_sinks" * sinking,
        "attention/serial_decode.metal" if serial else "attention/decode.metal",
        function=function,
        inputs=tuple(name for name in _INPUTS if name not in omitted),
        omitted=omitted + tuple(f"{name}_strides" for name in omitted),
        outputs=("out",),
        template=(*_TYPES, *_SHAPES, *_OPTIONS, *own),
        threadgroup_memory=0 if serial else _memory,
        large=True,
        ensure_row_contiguous=False,
    )


@cache
def _combine(sinking: bool) -> Kernel:
    return Kernel(
        "attention_combine" + "_sinks" * sinking,
        "attention/combine.metal",
        function="attention_combine",
        inputs=("parts", "sinks") if sinking else ("parts",),
        omitted=() if sinking else ("sinks",),
        outputs=("out",),
        template=("T", "N", "Dv", "simds", "sinking"),
        large=True,
    )


# What `seen` of the kernel can be.
_ALL, _CAUSAL, _BOOLEAN, _ADDITIVE = range(4)


@dataclass(frozen=True)
class Decode:
    """How decoding attention is spread over threads.

    Attributes:
        columns: eights of query rows in a threadgroup.
        simds: SIMD groups of a threadgroup; each adds up its slice of the values.
        blocks: blocks of 16 keys that a SIMD group takes at once.
        slice: the width of a slice: 16, 32 or 64.
        run: neighbouring elements of a key that a lane reads at once.
        stretch: the fewest keys for which a threadgroup is started.
        most: the most stretches that the keys of a head are cut into.
        combine: SIMD groups that add up the stretches of a row.
        resident: threadgroups that a multiprocessor of CUDA's should have registers for; 0 leaves
            it to the compiler.
    """

    columns: int
    simds: int
    blocks: int
    slice: int
    run: int
    stretch: int
    most: int
    combine: int = 16
    resident: int = 0

    @property
    def tile(self) -> int:
        """Keys that a threadgroup takes at once."""
        return 16 * self.blocks * self.simds

    def stretches(self, keys: int) -> int:
        """Into how many stretches the keys are cut; it depends on nothing else."""
        return max(1, min(keys // max(self.stretch, self.tile), self.most))


@dataclass(frozen=True)
class Serial:
    """How decoding attention is spread where threads run one by one.

    Attributes:
        most: query rows of a thread.
        block: keys that are made floats of at once.
    """

    most: int
    block: int = 32


def question(
    q: mx.array, k: mx.array | Packed, v: mx.array | Packed
) -> tuple[mx.Dtype, int, int, int, int, int, int]:
    """What dispatch is asked about a call: the fields of its problem."""
    _, heads, queries, width = q.shape
    packed = isinstance(k, tuple)
    keys, values = (a[0] if isinstance(a, tuple) else a for a in (k, v))
    batch, kv_heads, length, _ = keys.shape
    bits = 32 * keys.shape[3] // width if packed else 0
    v_width = 32 * values.shape[3] // bits if packed else values.shape[3]
    rows, caches = heads // kv_heads * queries, batch * kv_heads
    return q.dtype, rows, width, v_width, bits, caches, rounded(length)


# Into how many stretches keys are cut, of plain and of packed ones: fewer up to so many keys, then
# as many as make an H200 busy with the four key heads of a common model at once.
_STRETCHES = ((64, 99, 65536), (66, 132, 16384))
# Keys up to which a second launch costs more than it brings.
_ALONE = 256


def configure(
    device: str, dtype: mx.Dtype, rows: int, width: int, v_width: int, bits: int, keys: int
) -> Decode | Serial:
    """The configuration for a backend; it does not depend on the batch."""
    if device == "host":
        # A power of two, so that one kernel does for several shapes, in a stack of 128 KB.
        return Serial(most=min(1 << (rows - 1).bit_length(), 4096 // max(width, v_width, 64)))
    slice = 64 if bits else 32 if v_width >= 96 else 16
    simds, run = -(-v_width // slice), 16 if bits else 16 // dtype.size

    def fits(columns: int) -> bool:
        memory = _memory(T=dtype, D=width, columns=columns, simds=simds, blocks=1, run=run)
        # The sums of all rows must stay in registers.
        return memory <= MAX_THREADGROUP_MEMORY and columns * slice <= 256

    columns = next(n for n in range(min(-(-rows // 8), 8), 0, -1) if n == 1 or fits(n))
    few, many, long = _STRETCHES[bits > 0]
    most = 1 if keys <= _ALONE else few if keys <= long else many
    blocks = 2 if bits and columns == 1 else 1
    return Decode(columns, simds, blocks, slice, run, stretch=64, most=most)


def attention_decode(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    scale: float,
    mask: mx.array | str | None,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
    config: Decode | Serial,
) -> mx.array:
    """Attention in one pass over keys and values: one launch, or two with several stretches.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16; D and Dv multiples of 8 up to 256.
        k: (B, Hkv, S, D) in the dtype of ``q``, or (packed, scales, biases); any strides.
        v: (B, Hkv, S, Dv), or packed like ``k``.
        scale: what the products are multiplied by.
        mask: None, ``"causal"``, booleans or numbers that broadcast to (B, H, L, S).
        window: how many keys a query sees, itself included, or None.
        softcap: the bound of the scores, or None.
        sinks: (H,) floating point, or None.
        config: how to spread the work.

    Returns:
        (B, H, L, Dv) in the dtype of ``q``. It lies as (B, L, H, Dv), as what follows wants it.
    """
    prepared = Prepared(config, q, k, v, scale, mask, window, softcap, sinks)
    return prepared(q, k, v, mask if isinstance(mask, mx.array) else None, sinks)


class Prepared:
    """:func:`attention_decode` of any arrays with the shapes and dtypes of these.

    What Python works out for a call takes longer than the launches; here it is kept.
    """

    def __init__(
        self,
        config: Decode | Serial,
        q: mx.array,
        k: mx.array | Packed,
        v: mx.array | Packed,
        scale: float,
        mask: mx.array | str | None,
        window: int | None,
        softcap: float | None,
        sinks: mx.array | None,
    ) -> None:
        k_parts, v_parts = (a if isinstance(a, tuple) else (a,) for a in (k, v))
        seen = _CAUSAL if mask is not None and q.shape[2] > 1 else _ALL
        if isinstance(mask, mx.array):
            seen = _BOOLEAN if mask.dtype == mx.bool_ else _ADDITIVE
        mask_dtype = (mask if isinstance(mask, mx.array) else v_parts[-1]).dtype
        keys = k_parts[0].shape[2]
        # Their strides are what the kernel needs; an axis in front keeps it from being too small.
        self._mask_shape = (CONSTANT_BELOW, *q.shape[:3], keys)
        self._short = keys < CONSTANT_BELOW
        self._packed = len(k_parts) > 1
        self._swapped = q.shape[2] > 1
        self._options = _options(scale, softcap, window)
        self._launch, self._combine = _launches(
            config,
            q.shape,
            tuple(a.shape for a in k_parts[:2]),
            v_parts[0].shape[3],
            (
                *(q.dtype, k_parts[0].dtype, k_parts[-1].dtype, mask_dtype),
                mask_dtype if sinks is None else sinks.dtype,
            ),
            (seen, window, softcap is not None, sinks is not None),
        )

    def __call__(
        self,
        q: mx.array,
        k: mx.array | Packed,
        v: mx.array | Packed,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        arrays: list[Any] = [q, *k, *v] if self._packed else [q, k, v]
        if self._short:
            arrays = [*map(_long_enough, arrays)]
        if mask is not None:
            arrays.append(mx.broadcast_to(mask, self._mask_shape))
        if sinks is not None:
            arrays.append(sinks)
        arrays.append(self._options)
        (out,) = self._launch(arrays)
        if self._combine is not None:
            (out,) = self._combine([out] if sinks is None else [out, sinks])
        return out.swapaxes(1, 2) if self._swapped else out


def _launches(
    config: Decode | Serial,
    q_shape: tuple[int, ...],
    k_shapes: tuple[tuple[int, ...], ...],
    v_words: int,
    dtypes: tuple[mx.Dtype, ...],
    options: tuple[int, int | None, bool, bool],
) -> tuple[PreparedLaunch, PreparedLaunch | None]:
    """The launch of attention and, if there are several stretches, the one that adds them up."""
    (batch, heads, queries, width), (_, kv_heads, keys, words) = q_shape, k_shapes[0]
    seen, window, capped, sinking = options
    packed = len(k_shapes) > 1
    bits = 32 * words // width if packed else 0
    v_width = 32 * v_words // bits if packed else v_words
    group = width // k_shapes[1][3] if packed else 0
    rows = heads // kv_heads * queries
    # One query a head needs no other order of the axes.
    shape = (batch, heads, 1, v_width) if queries == 1 else (batch, queries, heads, v_width)
    kernel = _kernel(isinstance(config, Serial), packed, seen >= _BOOLEAN, sinking)
    template: dict[str, TemplateValue] = {
        **dict(zip(_TYPES, dtypes, strict=True)),
        **dict(zip(_SHAPES, (width, v_width, group, bits), strict=True)),
        **dict(zip(_OPTIONS, (seen, window is not None, capped, sinking), strict=True)),
    }
    if isinstance(config, Serial):
        template |= asdict(config)
        grid = (kv_heads, -(-rows // config.most), batch)
        return PreparedLaunch(kernel, template, grid, (1, 1, 1), [shape]), None
    # Where no array hides keys too, what lies outside the window is not visited.
    if window is not None and seen < _BOOLEAN:
        keys = min(keys, window + queries - 1)
    stretches, threads = config.stretches(keys), 32 * config.simds
    threadgroup = threads, 1, 1
    template |= {name: getattr(config, name) for name in _LAYOUT}
    template |= {"P": dtypes[0] if stretches == 1 else mx.float32, "split": stretches > 1}
    template["RESIDENT"] = config.resident
    grid = (stretches * threads, kv_heads * -(-rows // (8 * config.columns)), batch)
    if stretches == 1:
        return PreparedLaunch(kernel, template, grid, threadgroup, [shape]), None
    parts = (batch, queries, heads, stretches, v_width + 2)
    combine = _adding_up(parts, dtypes[0], dtypes[-1] if sinking else None, config.combine, shape)
    return PreparedLaunch(kernel, template, grid, threadgroup, [parts]), combine


def _adding_up(
    parts: tuple[int, ...],
    dtype: mx.Dtype,
    sinks: mx.Dtype | None,
    simds: int,
    shape: tuple[int, ...],
) -> PreparedLaunch:
    """The launch that adds up stretches (B, L, H, stretches, Dv + 2)."""
    batch, queries, heads, _, width = parts
    kernel = _combine(sinks is not None)
    values: tuple[TemplateValue, ...]
    values = (dtype, sinks or dtype, width - 2, simds, sinks is not None)
    template: dict[str, TemplateValue] = dict(zip(kernel.template, values, strict=True))
    grid, threadgroup = (32 * simds, heads, batch * queries), (32 * simds, 1, 1)
    return PreparedLaunch(kernel, template, grid, threadgroup, [shape])


def added_up(parts: mx.array, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """Stretches (B, L, H, stretches, Dv + 2), without sinks, to (B, L, H, Dv) as ``shape``."""
    return _adding_up(parts.shape, dtype, None, Decode.combine, shape)([parts])[0]


def _long_enough(array: mx.array) -> mx.array:
    """The array with something behind its rows if MLX would not pass it in device memory."""
    return array if array.size >= CONSTANT_BELOW else mx.pad(array, [(0, 0)] * 3 + [(0, 8)])


@lru_cache(maxsize=1024)
def _options(scale: float, softcap: float | None, window: int | None) -> mx.array:
    """The scale, with softcap before it, and the cap, as bits; the window."""
    factors = (scale * log2(e), 0) if softcap is None else (scale / softcap, softcap * log2(e))
    bits = unpack("2i", pack("2f", *factors))
    return mx.array([*bits, min(window or 0, 2**30)], mx.int32)
