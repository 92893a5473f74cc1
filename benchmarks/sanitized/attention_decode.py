"""Attention of a few queries over a cache: masks, widths, packed keys; one split and more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.decode import Decode
from mlx_qlayers.runtime.backend import backend
from tests.launchers import attention_decode, decode_config
from tests.metal.attention.test_decode import DTYPES, EXTRAS, MASKS, SHAPES, WIDTHS, check, make
from tests.packed import dequantize64

from . import Cases

# Bits, the size of a group, the dtype, and the widths.
PACKED = (
    (8, 64, mx.bfloat16, (128, 128)),
    (4, 64, mx.float16, (64, 256)),
    (8, 32, mx.float32, (96, 64)),
    (4, 128, mx.bfloat16, (128, 128)),
)


def cases() -> Cases:
    for i, kind in enumerate(MASKS):
        shape, widths, dtype = SHAPES[-1 - i % 4], WIDTHS[i], DTYPES[i % 3]
        splits = 1 + 2 * (i % 2)
        name = f"{kind} {shape} {widths} {dtype} {EXTRAS[i % 5]}, {splits} splits"
        yield name, partial(run, shape, widths, dtype, kind, i % 5, splits)
    shape = (1, 28, 4, 8, 300)
    yield f"many rows {shape}", partial(run, shape, (128, 128), mx.bfloat16, "causal", 0, 3)
    for i, (bits, group, dtype, widths) in enumerate(PACKED):
        run_packed = partial(run, SHAPES[1 + i % 4], widths, dtype, "causal", i, 3, (bits, group))
        yield f"{bits} bits in groups of {group}, {widths} {dtype}", run_packed


def run(
    shape: tuple[int, ...],
    widths: tuple[int, int],
    dtype: mx.Dtype,
    kind: str,
    extra: int,
    splits: int,
    packing: tuple[int, int] | None = None,
) -> None:
    (q, *caches), options = make(extra, shape, widths, dtype, kind, EXTRAS[extra])
    exact = caches
    if packing is not None:
        bits, group = packing
        caches = [tuple(mx.quantize(a, group, bits)) for a in caches]
        exact = [(dequantize64(*a, Format(group, bits)),) for a in caches]
    config = decode_config(backend(), q, *caches)
    if isinstance(config, Decode):
        config = replace(config, max_splits=splits)
    check(attention_decode(q, *caches, **options, config=config), (q, *exact), options)
