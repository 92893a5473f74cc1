"""How 9 to 128 rows times packed matrices are spread. For NVIDIA GPUs alone, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...formats import Format
from ...measurements.thresholds import tabled
from ...runtime.devices import device_of
from .tile import Tile, dynamic_memory

MAX_SKINNY_ROWS = 128
# Rows up to which products share what was measured.
SKINNY_ROWS = (16, 24, 32, 64, MAX_SKINNY_ROWS)
# Rows by which sums of long rows are divided, where their order may not depend on the rows.
_FIXED = 16
# Operands of 8 rows that the kernel is compiled for: each takes its time.
_FRAGMENTS = (2, 3, 4, 6, 8)


def skinny_config(
    device: str, rows: int, n: int, k: int, fmt: Format, single: bool = False
) -> Tile:
    """The configuration for 9 to 128 rows of one or several matrices with n columns in all."""
    fragments = next((f for f in _FRAGMENTS if 8 * f >= rows), _FRAGMENTS[-1])
    odd = fmt.bits % 2 == 1
    if not device_of(device).tensor_cores:
        # M1 and M2 have registers for so many sums.
        return _skinny(min(fragments, 6 if odd else 8), 32 if odd else 16, 1, 4, 1, stages=1)
    if (persistent := _persistent(rows, n, k, fmt, single)) is not None:
        return persistent
    # Four SIMD groups at once pay where there are many rows. A small matrix is read twice rather
    # than by half of the GPU.
    of, tiles_in_all = tabled("qmm_skinny_spread", device="cuda"), -(-n // 16)
    warpgroup, small = rows >= of["warpgroup"], tiles_in_all <= of["small"]
    if warpgroup:
        fragments = 4 if small else 8
    elif small:
        fragments = 2
    run = 32 if odd or (not warpgroup and fmt.bits < 8 and k % 32 == 0) else 16
    # All multiprocessors are busy to the end: as many tiles for each, in as few rounds as there are
    # registers for.
    processors = device_of("cuda").cores
    work = tiles_in_all * -(-rows // (8 * fragments))
    most = of["tiles_warpgroup" if warpgroup else "tiles"]
    each = -(-work // (processors * -(-work // (processors * most))))
    tiles = 2 if each > 3 and not warpgroup else 1
    simds_n = -(-each // 4) * 4 if warpgroup else -(-each // tiles)
    simds_k = max(1, (16 if tiles == 1 else 9) // simds_n)
    config = _skinny(
        *(fragments, run, tiles, simds_n, simds_k),
        stages=2 if warpgroup or simds_k == 1 else 1,
        warpgroup=warpgroup,
        chunk=min(fragments, 4),
        block_tiles=max(1, fmt.group_size // run),
    )
    while not _fits(config):
        if config.chunk > 1:
            config = replace(config, chunk=config.chunk - 1)
        else:
            config = replace(config, simds_k=config.simds_k - 1)
    # As many K tiles at a time as each SIMD group can fetch an operand of.
    while simds_k == 1 and 2 * config.stage_tiles * fragments <= simds_n:
        deeper = replace(config, stage_tiles=2 * config.stage_tiles)
        if not _fits(deeper):
            break
        config = deeper
    return config


def _persistent(rows: int, n: int, k: int, fmt: Format, single: bool) -> Tile | None:
    """With x persistent in shared memory, where that was measured to be faster: with many tiles.

    Long rows of a single matrix that has fewer tiles are divided until it has enough.
    """
    of = tabled("qmm_skinny_spread", device="cuda")
    fragments, run = -(-rows // 8), 32 if fmt.bits < 8 else 16
    k_tiles, of_k_tile = -(-k // (4 * run)), 64 * run * fragments
    most = dynamic_memory() // of_k_tile
    parts = -(-k_tiles // max(most, 1))
    processors = device_of("cuda").cores
    if parts > 1:
        parts = max(parts, -(-of["part_tiles"] * processors // -(-n // 16)))
    work = -(-n // 16) * parts
    each = -(-work // (processors * -(-work // (processors * of["tiles"]))))
    divided = parts == 1 or (single and n < k and 2 * parts <= k_tiles)
    if rows > of["persistent_rows"] or k % run or each < of["persistent_tiles"] or not divided:
        return None
    whole = max(1, fmt.group_size // (4 * run))
    return _skinny(
        *(fragments, run, 1, each, of["tiles"] // each),
        stages=0,
        chunk=2,
        block_tiles=max(1, fmt.group_size // run),
        stage_tiles=-(-k_tiles // (parts * whole)) * whole,
    )


def fixed_order(device: str, rows: int, sizes: Sequence[int], k: int, fmt: Format) -> Tile | None:
    """The configuration of 1 to 128 rows of matrices of such sizes, for sums of fixed orders.

    A column is added up as by a launch of its matrix alone, a row as with others: by simds_k SIMD
    groups, or in the parts of sixteen rows. None if the matrices differ in that.
    """
    fragments = min(2, -(-rows // 8))
    own = [skinny_config(device, _FIXED, n, k, fmt, single=True) for n in sizes]
    if any(each.parts(k) > 1 for each in own):
        return None if len(own) > 1 else replace(own[0], fragments=fragments)
    of, processors = tabled("qmm_skinny_spread", device="cuda"), device_of("cuda").cores
    small, *others = {-(-n // 16) <= of["small"] for n in sizes}
    if others:
        return None
    run = 32 if fmt.bits % 2 == 1 or (fmt.bits < 8 and k % 32 == 0) else 16
    block_tiles, whole = max(1, fmt.group_size // run), max(1, fmt.group_size // (4 * run))
    # Of a small matrix up to eight SIMD groups share K, as many blocks of it each.
    blocks = -(-k // (4 * run * block_tiles))
    simds_k = -(-blocks // -(-blocks // 8)) if small else 1
    work, most = sum(-(-n // 16) for n in sizes), max(3, of["tiles"] // simds_k)
    each = -(-work // (processors * -(-work // (processors * most))))
    config = _skinny(
        *(fragments, run, 1, each if rows <= _FIXED else most, simds_k),
        stages=0,
        block_tiles=block_tiles,
        stage_tiles=-(-k // (4 * run * whole)) * whole,
    )
    if config.memory(fmt) > max(dynamic_memory(), device_of("cuda").threadgroup_memory):
        config = replace(config, stages=1, stage_tiles=1)
        while not _fits(config):
            config = replace(config, simds_n=config.simds_n - 1)
    return config if config.takes(k) else None


def _fits(config: Tile) -> bool:
    return config.memory(Format(64, 4)) <= device_of("cuda").threadgroup_memory


def _skinny(
    fragments: int, run: int, tiles: int, simds_n: int, simds_k: int, stages: int = 2, **more: Any
) -> Tile:
    """With what all of them have, but for ``more``."""
    more = {"fragments": fragments, "tiles": tiles, "simds_n": simds_n, "simds_k": simds_k} | more
    return Tile("qmm_skinny", run, stages=stages, **{"ahead": 2, "occupancy": 1, **more})
