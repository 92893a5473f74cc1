"""Launches attention of few queries over a long cache, split over keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from struct import pack, unpack

import mlx.core as mx

from ..runtime.kernel import Kernel
from ..runtime.signature import CONSTANT_BELOW

Packed = tuple[mx.array, mx.array, mx.array]

MAX_QUERIES = 8

_DECODE = Kernel(
    "attention_decode",
    "attention_decode.metal",
    inputs=(
        "q",
        "k",
        "k_scales",
        "k_biases",
        "v",
        "v_scales",
        "v_biases",
        "mask",
        "sinks",
        "options",
    ),
    outputs=("out",),
    template=(
        "T",
        "K",
        "S",
        "M",
        "N",
        "P",
        "D",
        "Dv",
        "group",
        "bits",
        "columns",
        "simds",
        "blocks",
        "slice",
        "run",
        "seen",
        "windowed",
        "capped",
        "sinking",
        "split",
    ),
    large=True,
    ensure_row_contiguous=False,
)
_COMBINE = Kernel(
    "attention_combine",
    "attention_decode.metal",
    inputs=("parts", "sinks"),
    outputs=("out",),
    template=("T", "N", "Dv", "simds", "sinking"),
)


@dataclass(frozen=True)
class Decode:
    """How decoding attention is spread over threads.

    Attributes:
        columns: query rows of a threadgroup, in eights.
        simds: SIMD groups of a threadgroup.
        blocks: blocks of 16 keys that a SIMD group takes at once.
        slice: width of the part of a value that a SIMD group adds up: 16, 32 or 64.
        run: neighbouring elements of a key that a lane reads at once.
        stretch: the least keys of a threadgroup.
        most: the most stretches that the keys are cut into, for one key head.
        combine: SIMD groups that add up the stretches of a row.
    """

    columns: int
    simds: int
    blocks: int
    slice: int
    run: int
    stretch: int
    most: int
    combine: int = 8


def decode(
    device: str, dtype: mx.Dtype, rows: int, kv_heads: int, width: int, v_width: int, bits: int
) -> Decode:
    slice = 64 if bits else 32 if v_width >= 96 else 16
    simds = -(-v_width // slice)
    run = 16 // dtype.size if not bits else 16
    columns = min(-(-rows // 8), 8)
    return Decode(columns, simds, 1, slice, run, 64, 128)


def attention_decode(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    scale: float,
    mask: mx.array | str | None,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
    config: Decode,
    bits: int = 0,
    group: int = 0,
) -> mx.array:
    batch, heads, queries, width = q.shape
    keys, *scales = k if isinstance(k, tuple) else (k, k, k)
    values, *v_scales = v if isinstance(v, tuple) else (v, v, v)
    kv_heads, length = keys.shape[1:3]
    v_width = values.shape[3] * 32 // bits if bits else values.shape[3]
    rows = heads // kv_heads * queries
    seen = 0
    if isinstance(mask, mx.array):
        seen = 2 if mask.dtype == mx.bool_ else 3
        mask = mx.broadcast_to(mask, (8, batch, heads, queries, length))
    elif mask is not None and queries > 1:
        seen = 1
    visited = length
    if window is not None and seen < 2:
        visited = min(length, window + queries - 1)
    tile = 16 * config.blocks * config.simds
    stretches = max(1, min(visited // max(config.stretch, tile), config.most))
    arrays = [q, keys, *scales, values, *v_scales]
    if length < CONSTANT_BELOW:
        arrays[1:] = [_long(a, 2) for a in arrays[1:]]
    template = {
        "T": q.dtype,
        "K": keys.dtype,
        "S": scales[0].dtype,
        "M": mask.dtype if seen > 1 else mx.float32,
        "N": q.dtype if sinks is None else sinks.dtype,
        "P": q.dtype if stretches == 1 else mx.float32,
        "D": width,
        "Dv": v_width,
        "group": group,
        "bits": bits,
        "columns": config.columns,
        "simds": config.simds,
        "blocks": config.blocks,
        "slice": config.slice,
        "run": config.run,
        "seen": seen,
        "windowed": window is not None,
        "capped": softcap is not None,
        "sinking": sinks is not None,
        "split": stretches > 1,
    }
    threads = 32 * config.simds
    blocks = -(-rows // (8 * config.columns))
    shape = (batch, queries, heads, v_width)
    if stretches > 1:
        shape = (batch, queries, heads, stretches, v_width + 2)
    (out,) = _DECODE(
        [
            *arrays,
            mask if seen > 1 else nothing(),
            q if sinks is None else sinks,
            _options(scale, softcap, window),
        ],
        template=template,
        grid=(stretches * threads, kv_heads * blocks, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape],
    )
    if stretches == 1:
        return out.swapaxes(1, 2)
    (out,) = _COMBINE(
        [out, q if sinks is None else sinks],
        template={
            "T": q.dtype,
            "N": q.dtype if sinks is None else sinks.dtype,
            "Dv": v_width,
            "simds": config.combine,
            "sinking": sinks is not None,
        },
        grid=(32 * config.combine, heads, queries * batch),
        threadgroup=(32 * config.combine, 1, 1),
        output_shapes=[(batch, queries, heads, v_width)],
    )
    return out.swapaxes(1, 2)


@cache
def nothing() -> mx.array:
    return mx.zeros((8, 1, 1, 1, 1))


def _long(array: mx.array, axis: int) -> mx.array:
    """A short axis made long enough for MLX to pass the array in device memory."""
    missing = CONSTANT_BELOW - array.shape[axis]
    if missing <= 0 or array.size >= CONSTANT_BELOW:
        return array
    return mx.pad(array, [(0, missing if i == axis else 0) for i in range(4)])


@lru_cache(maxsize=256)
def _options(scale: float, softcap: float | None, window: int | None) -> mx.array:
    log2_e = 1.4426950408889634
    factor, cap = (scale * log2_e, 0.0) if softcap is None else (scale / softcap, softcap * log2_e)
    return mx.array([*(unpack("i", pack("f", x))[0] for x in (factor, cap)), window or 0], mx.int32)
