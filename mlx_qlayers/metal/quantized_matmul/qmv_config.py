"""How qmv is spread over threads, by rules and the tables of devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx

from ...formats import Format
from ...measurements.thresholds import tabled
from ...runtime.backend import current
from ...runtime.devices import device_of
from ...runtime.devices.record import MAX_THREADGROUP_MEMORY, most_threads
from .tile import INTEGERS, SERIAL, Tile, matrix_registers, packed_template

MAX_QMV_ROWS = 16
# Rows up to which a CPU rounds them to 8 bits, where it may.
MOST_ROUNDED = 8
# Threads of a threadgroup on the matrix units of M1 and M2.
_MOST_OF_FEW = 256


def qmv_config(
    device: str, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format, kind: str = ""
) -> Tile:
    """The configuration on a backend's device, of 1 to 16 rows, or on a CPU of any number.

    ``n`` counts the outputs of all matrices, and ``kind`` says what the launch does besides, for
    what was tuned: ``norm-3``, ``norm-gate``, ...
    """
    at = device_of(device)
    if not at.gpu:
        # In float32 more rows are as fast.
        rounds = current.get().integers and rows <= MOST_ROUNDED and fmt.mode == "affine"
        if rounds and fmt.bits in (4, 8) and fmt.group_size % 32 == 0 and k % 64 == 0:
            rows, size = 1 if rows == 1 else MOST_ROUNDED, fmt.group_size
            return Tile(INTEGERS, size, rows, outputs=32, lanes=1, local=1)
        # A thread dequantizes a tile for all rows, whose sums are in the nearest caches.
        if rows > MAX_QMV_ROWS and k % 32 == 0:  # whole vectors of bfloat
            return Tile(SERIAL, fmt.group_size, 4 * MAX_QMV_ROWS, outputs=16, lanes=1, local=1)
        if rows > 1:
            return Tile(SERIAL, fmt.group_size, MAX_QMV_ROWS, outputs=8, lanes=1, local=2)
        return Tile(SERIAL, fmt.group_size, 1, outputs=4, lanes=1, local=8)
    # Apple's matrix units multiply no faster than its other units: an estimate.
    if dtype != mx.float32 and (at.tensor_cores or rows > 3):
        if at.tensor_cores and (persistent := _persistent(rows, n, k, fmt, kind)):
            return persistent
        config = matrix_config(device, rows, n, k, fmt, "norm" in kind)
        smaller = config if at.spills else _within_registers(config, dtype, fmt)
        if smaller is not None:
            return smaller
    return any_units(device, rows, fmt)


def invariant_config(device: str, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format) -> Tile:
    """Of 1 to 16 rows on a GPU, each added up as it is with others: how many share weights."""
    if dtype == mx.float32 or not device_of(device).tensor_cores:
        return any_units(device, rows, fmt, few=True)
    most = matrix_config(device, MAX_QMV_ROWS, n, k, fmt, normed=False)
    return replace(most, fragments=-(-rows * most.fragments // MAX_QMV_ROWS))


def any_units(device: str, rows: int, fmt: Format, few: bool = False) -> Tile:
    """For every GPU and dtype: sums and unpacked weights stay in registers; ``few`` in a run."""
    at = device_of(device)
    longer = at.gpu and not (at.spills or few) and rows == 1 and fmt.group_size > 16
    run = 32 if fmt.bits % 2 or longer else 16
    rows = next(n for n in (1, 2, 4, 8, MAX_QMV_ROWS) if n >= rows)
    outputs = 4 if rows * run <= (64 if at.spills or run == 16 else 32) else 2
    return Tile("qmv", run, rows, outputs)


def _within_registers(config: Tile, dtype: mx.Dtype, fmt: Format) -> Tile | None:
    """The configuration, or a smaller one for the registers of M1 and M2: at most 256 threads."""
    few = device_of("metal").few_registers
    told: dict[str, Any] = {**packed_template(fmt, dtype, dtype), "normed": True}
    sizes = product((config.tiles, 2), (config.simds_k, 8), (config.ahead, 1))
    for tiles, simds_k, ahead in sizes:
        smaller = replace(config, tiles=tiles, simds_k=min(simds_k, config.simds_k), ahead=ahead)
        # With a gate tiles come in pairs.
        paired: Any = smaller.paired().template()
        most = most_threads(matrix_registers(**told, **paired))
        if smaller.threads <= (min(most, _MOST_OF_FEW) if few else most):
            return smaller
    return None


def _persistent(rows: int, n: int, k: int, fmt: Format, kind: str) -> Tile | None:
    """A threadgroup for each multiprocessor, or several, if that was measured to be faster."""
    of = tabled("qmv_persistent", device="cuda")
    wide = n >= of["columns"] and k <= of["depth"]
    if fmt != Format(64, 4) or rows > of["rows"] or "norm" in kind or not wide:
        return None
    simds_k, groups = -(-k // 256), of["threadgroups"] * device_of("cuda").cores
    rounds = -(-n // (groups * of["tiles"]))
    tiles = -(-n // (groups * rounds))
    units: Any = {"fragments": 1, "tiles": tiles + tiles % 2, "simds_k": simds_k}
    return Tile("qmv_persistent", 64, **units, ahead=2, occupancy=16)


def matrix_config(device: str, rows: int, n: int, k: int, fmt: Format, normed: bool) -> Tile:
    """By the table of tiles; for GPUs without one, an estimate."""
    group, bits, mode = fmt
    small = n <= tabled("qmv_small", device=_table(device))
    if mode == "nvfp4":
        run, slots = 16 if k % 32 else 32, 1
    else:
        # As many neighbours as are 32 bytes at most (in 6 bits 48, two or three of 16), but no more
        # columns than one operand has, down to one group at a time and to the words that begin and
        # end with a code; on Apple's GPUs further, since a product of two operands costs twice as
        # much there. Those of a normed x take twice the registers.
        whole = max(group // 4, {2: 16, 4: 8, 6: 16, 8: 4}.get(bits, 32))
        at = device_of(device)
        least = whole if at.tensor_cores or not at.gpu else group // 4
        run = max(whole, min(group, 64 if not normed else 16 if small else 32))
        most = 384 if bits == 6 else 256
        while run > least and (run * bits > most or 4 * run // group * rows > 8):
            run //= 2
        slots = 4 * run // group
    fragments = -(-rows * slots // 8)
    # Other formats than these, and more of x, take more registers.
    light = mode == "affine" and bits in (2, 4) and fragments * run <= (64 if rows < 3 else 32)
    kinds = ("normed",) if normed else ("light" if light else "", f"{bits} bits", mode)
    tiles, simds_k, ahead, occupancy = next(
        each["tile"]
        for each in tabled("qmv_tiles", device=_table(device))
        if each["rows"][0] <= rows <= each["rows"][1] and each.get("kind") in (None, *kinds)
        if n <= each.get("n", n) and k >= each.get("k", 0)
    )
    occupancy = 8 if fragments * run > 64 and not normed else occupancy
    units: Any = {"fragments": fragments, "tiles": tiles, "simds_k": simds_k}
    config = Tile("qmv_matrix", run, **units, ahead=ahead, occupancy=occupancy)
    return within_memory(config, fmt)


def within_memory(config: Tile, fmt: Format) -> Tile:
    """The configuration, with fewer SIMD groups, or tiles where those are as many as steps."""
    while config.memory(fmt) > MAX_THREADGROUP_MEMORY:
        if config.kernel == "qmv_matrix":
            config = replace(config, simds_k=config.simds_k // 2)
        elif config.tiles > 2:
            config = replace(config, tiles=config.tiles - 2)
        else:
            break
    return config


def _table(device: str) -> str:
    """The backend whose tables hold: of matrix units, or of GPUs without."""
    return "cuda" if device_of(device).tensor_cores else "metal"
