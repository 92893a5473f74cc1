"""How qmv is spread over threads: configurations, their choice, and what they take of a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, ClassVar, TypeVar

import mlx.core as mx

from ...formats import MODES, Format
from ...measurements.thresholds import threshold
from ...runtime.devices import device_of
from ...runtime.devices.record import MAX_THREADGROUP_MEMORY, most_threads
from ...runtime.launch import TemplateValue

MAX_QMV_ROWS = 16
# Threads of a threadgroup on the matrix units of M1 and M2.
_MOST_OF_FEW = 256
_AFFINE, _NVFP4 = (list(MODES).index(mode) for mode in ("affine", "nvfp4"))


def packed_template(fmt: Format, dtype: mx.Dtype, scales: mx.Dtype) -> dict[str, TemplateValue]:
    """What every kernel on packed matrices is told: dtypes of rows and scales, and the format."""
    mode = list(MODES).index(fmt.mode)
    return {"T": dtype, "S": scales, "mode": mode, "group": fmt.group_size, "bits": fmt.bits}


@dataclass(frozen=True)
class QmvConfig:
    """How qmv is spread over threads.

    Attributes:
        rows: rows that the kernel is compiled for; a product may have fewer.
        outputs: columns of the result that one SIMD group, or one thread, computes.
        run: neighbouring elements of a row of the matrix that a thread takes at once; a multiple
            of 16, or of 32 where ``bits`` is odd, that divides the group size.
        lanes: threads that share the columns: 32, or 1 where threads do not run side by side.
        ways: float32 sums that a thread keeps for each output; divides ``run``.
        threads: threads of a threadgroup; a multiple of ``lanes``.
    """

    rows: int
    outputs: int
    run: int
    lanes: int
    ways: int
    threads: int

    template: ClassVar = ("rows", "outputs", "run", "lanes", "ways")

    def threadgroups(self, sizes: tuple[int, ...], gated: bool) -> int:
        """As many as matrices of so many rows take."""
        height = self.outputs // 2 if gated else self.outputs
        tiles = sum(-(-n // height) for n in (sizes[:1] if gated else sizes))
        return -(-tiles * self.lanes // self.threads)


@dataclass(frozen=True)
class QmvPersistentConfig:
    """How qmv is spread over threadgroups that stay, on the matrix units.

    A SIMD group takes four runs of each row: 4 * run * simds elements are a row or more.

    Attributes:
        fragments: operands of 8 columns, which hold the rows times the groups that the four lanes
            of a row of the matrix take side by side (4 * run / group_size, in NVFP4 one).
        run: neighbouring elements of a row of the matrix that a lane takes at once; it divides K.
        tiles: tiles of 16 rows of the matrix that a threadgroup computes.
        simds: SIMD groups of a threadgroup, which share K.
        ahead: runs that a lane has under way for each row, 1, 2 or 4.
        occupancy: SIMD groups that an NVIDIA multiprocessor should have registers for at once; 0
            leaves that to the compiler.
    """

    fragments: int
    run: int
    tiles: int
    simds: int
    ahead: int = 1
    occupancy: int = 0

    template: ClassVar[Any] = ("fragments", "run", "tiles", "simds", "ahead", "RESIDENT")

    def takes(self, k: int) -> bool:
        """Whether rows of so many elements are whole runs, and enough."""
        return k % self.run == 0 and k <= 4 * self.run * self.simds

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simds

    @property
    def resident(self) -> int:
        """Threadgroups that a core should hold at once."""
        return self.occupancy * 32 // self.threads

    @property
    def height(self) -> int:
        """Tiles of a threadgroup."""
        return self.tiles

    def threadgroups(self, sizes: tuple[int, ...], gated: bool) -> int:
        """As many as matrices of so many rows take."""
        return -(-sum(-(-n // 16) for n in sizes) // self.height)


@dataclass(frozen=True)
class QmvMatrixConfig(QmvPersistentConfig):
    """How qmv is spread over SIMD groups that use the matrix units.

    Attributes:
        stacks: SIMD groups that share a part of K, each with ``tiles`` tiles of its own; the sums
            of these are in registers.
    """

    stacks: int = 1

    template = ("fragments", "run", "tiles", "stacks", "simds", "ahead", "RESIDENT")

    def takes(self, k: int) -> bool:
        """Whether rows of so many elements are whole runs."""
        return k % self.run == 0

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simds * self.stacks

    @property
    def height(self) -> int:
        """Tiles of a threadgroup."""
        return self.tiles * self.stacks


Units = TypeVar("Units", bound=QmvPersistentConfig)


def qmv_config(
    device: str, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format, kind: str = ""
) -> QmvConfig | QmvPersistentConfig:
    """The configuration on a backend's device, of 1 to 16 rows.

    ``n`` counts the outputs of all matrices, and ``kind`` says what the launch does besides, for
    what was tuned: ``norm-3``, ``norm-gate``, ...
    """
    at = device_of(device)
    if not at.gpu:
        # A thread is a loop of vector instructions: 16 floats fill the widest registers there are.
        # Its loops over rows are not unrolled, so that one kernel does for all but the single row.
        rows = 1 if rows == 1 else MAX_QMV_ROWS
        return QmvConfig(rows, outputs=4, run=fmt.group_size, lanes=1, ways=16, threads=8)
    # Apple's matrix units multiply no faster than its other units: an estimate.
    if dtype != mx.float32 and (at.tensor_cores or rows > 3):
        if at.tensor_cores and (stays := _persistent(rows, n, k, fmt, kind)):
            return stays
        config = matrix_config(device, rows, n, k, fmt, "norm" in kind)
        smaller = config if at.spills else _within_registers(config, dtype, fmt)
        if smaller is not None:
            return smaller
    return any_units(device, rows, fmt)


def any_units(device: str, rows: int, fmt: Format) -> QmvConfig:
    """For every GPU and dtype: sums and unpacked weights stay in registers."""
    at = device_of(device)
    longer = at.gpu and not at.spills and rows == 1 and fmt.group_size > 16
    run = 32 if fmt.bits % 2 or longer else 16
    rows = next(n for n in (1, 2, 4, 8, MAX_QMV_ROWS) if n >= rows)
    outputs = 4 if rows * run <= (64 if at.spills or run == 16 else 32) else 2
    return QmvConfig(rows, outputs, run, lanes=32, ways=1, threads=64)


def _within_registers(
    config: QmvMatrixConfig, dtype: mx.Dtype, fmt: Format
) -> QmvMatrixConfig | None:
    """The configuration, or a smaller one, for which M1 and M2 have registers.

    There at most 256 threads: larger threadgroups are near what compilers leave room for.
    """
    few = device_of("metal").few_registers
    told: dict[str, Any] = {**packed_template(fmt, dtype, dtype), "normed": True}
    sizes = product((config.tiles, 2), (config.simds, 8), (config.ahead, 1))
    for tiles, simds, ahead in sizes:
        smaller = replace(config, tiles=tiles, simds=min(simds, config.simds), ahead=ahead)
        # With a gate tiles come in pairs.
        spread = asdict(smaller) | {"tiles": tiles + tiles % 2}
        most = most_threads(matrix_registers(**told, **spread))
        if smaller.threads <= (min(most, _MOST_OF_FEW) if few else most):
            return smaller
    return None


def _persistent(rows: int, n: int, k: int, fmt: Format, kind: str) -> QmvPersistentConfig | None:
    """Where an H200 was measured to be faster so: a threadgroup to each multiprocessor.

    Where that would take too much memory, twice or more times as many.
    """
    simds = -(-k // 256)
    if fmt != Format(64, 4) or rows > 2 or simds > 16 or "norm" in kind or n < 16384:
        return None
    groups = 16 * threshold("multiprocessors", device="cuda")
    rounds = -(-n // (groups * 18))
    tiles = -(-n // (groups * rounds))
    return QmvPersistentConfig(1, 64, tiles + tiles % 2, simds, ahead=2, occupancy=16)


def matrix_config(
    device: str, rows: int, n: int, k: int, fmt: Format, normed: bool
) -> QmvMatrixConfig:
    """Measured on an H200; for other GPUs an estimate."""
    group, bits, mode = fmt
    # Not many more tiles than an H200 runs threadgroups of 16 SIMD groups.
    small = n <= 8192
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
    if normed:
        config = QmvMatrixConfig(fragments, run, *((1, 8) if small else (2, 4)))
    else:
        # Other formats than these, and more of x, take more registers.
        light = mode == "affine" and bits in (2, 4) and fragments * run <= (64 if rows < 3 else 32)
        kinds = ("light" if light else "", f"{bits} bits", mode)
        tiles, simds, ahead, occupancy = _tile(device, rows, n, k, *kinds)
        occupancy = 8 if fragments * run > 64 else occupancy
        config = QmvMatrixConfig(fragments, run, tiles, simds, ahead, occupancy=occupancy)
    return within_memory(config, fmt)


def within_memory(config: Units, fmt: Format) -> Units:
    """The configuration, with fewer SIMD groups, or tiles where those are as many as steps."""
    while units_memory(config, fmt) > MAX_THREADGROUP_MEMORY:
        if isinstance(config, QmvMatrixConfig):
            config = replace(config, simds=config.simds // 2)
        elif config.tiles > 2:
            config = replace(config, tiles=config.tiles - 2)
        else:
            break
    return config


def _tile(device: str, rows: int, n: int, k: int, *kinds: str) -> tuple[int, int, int, int]:
    """Tiles, SIMD groups, runs ahead and occupancy, of the device's table."""
    at = "cuda" if device_of(device).tensor_cores else "metal"
    for each in threshold("qmv_tiles", device=at):
        (least, most), kind = each["rows"], each.get("kind")
        in_range = least <= rows <= most and n <= each.get("n", n) and k >= each.get("k", 0)
        if in_range and kind in (None, *kinds):
            tile: tuple[int, int, int, int] = each["tile"]
            return tile
    raise ValueError(f"the table qmv_tiles has no {rows} rows, {n} x {k}")


def threadgroup_memory(*, simds: int, tiles: int, stacks: int, fragments: int, **_: object) -> int:
    """Bytes that the kernel on the matrix units takes."""
    return 4 * simds * fragments * 8 * stacks * (tiles * 16 + 1)


def persistent_memory(
    *, simds: int, tiles: int, fragments: int, mode: int, group: int, run: int, **_: object
) -> int:
    """The same where threadgroups stay."""
    slots = 1 if mode == _NVFP4 else 4 * run // group
    return 4 * simds * fragments * 8 * (tiles * 16 // slots + 1)


def units_memory(config: QmvPersistentConfig, fmt: Format) -> int:
    """Bytes that the kernel of a configuration on the matrix units takes."""
    if isinstance(config, QmvMatrixConfig):
        return threadgroup_memory(**asdict(config))
    return persistent_memory(
        mode=list(MODES).index(fmt.mode), group=fmt.group_size, **asdict(config)
    )


def registers(
    *, rows: int, outputs: int, run: int, ways: int, normed: bool = False, **_: object
) -> int:
    """Words of the arrays of a thread of qmv: weights, sums, and squares of x or x itself.

    The weights of a single row are used as they are unpacked.
    """
    weights = 2 * run if rows == 1 else outputs * run
    return weights + rows * outputs * ways + rows * normed


def matrix_registers(
    *,
    T: mx.Dtype,
    mode: int,
    group: int,
    bits: int,
    normed: bool,
    fragments: int,
    run: int,
    tiles: int,
    ahead: int,
    **_: object,
) -> int:
    """The same on the matrix units: packed words and numbers of the tiles, x, and sums."""
    affine = mode == _AFFINE
    numbers = (6 if affine else 4) * (run // 16 if group == 16 else 1)
    # Runs that begin within a word take more than they have.
    words = -(-run * bits // 32) + (run * bits % 16 > 0)
    of_tile = 2 * ahead * words + numbers + 4 + 4 * fragments
    # Short runs of x are loaded a step ahead.
    operands = fragments * run * T.size // 4 * (2 if run <= 16 else 1)
    sums = 4 * fragments * (2 if affine else 1) + 2 * fragments * normed
    return tiles * of_tile + operands + sums + 2 * T.size


def persistent_registers(*, ahead: int, **told: Any) -> int:
    """The same where threadgroups stay: of their tiles `ahead` are in registers, a run of each."""
    return matrix_registers(**told | {"tiles": ahead, "ahead": 1})
