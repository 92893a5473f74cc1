"""How products of few rows are spread over threads, and what that takes of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ...formats import MODES, Format
from ...runtime.devices import device_of
from ...runtime.launch import TemplateValue

_AFFINE, _NVFP4 = (list(MODES).index(mode) for mode in ("affine", "nvfp4"))
# Bytes that are declared beside dynamic shared memory, and aligned.
_DECLARED = 2048
_UNITS = {n: n for n in ("fragments", "run", "tiles", "simds_k", "ahead")} | {
    "RESIDENT": "resident"
}
# The kernel for processors whose threads run one by one.
SERIAL = "qmv_serial"
# The same kernel, with rows rounded to 8 bits in blocks of 32.
INTEGERS = "qmv_integers"
# Of each kernel its parameters, in their order, and the fields that they are.
PARAMETERS: dict[str, dict[str, str]] = {
    "qmv": {name: name for name in ("rows", "outputs", "run")},
    **{
        kernel: {n: n for n in ("rows", "outputs", "run", "integers")}
        for kernel in (SERIAL, INTEGERS)
    },
    "qmv_matrix": _UNITS | {"simds_n": "simds_n"},
    "qmv_persistent": _UNITS,
    "qmm_skinny": _UNITS
    | {"simds_n": "simds_n", "stages": "stages", "SHARED": "shared"}
    | {name: name for name in ("stage_tiles", "chunk", "block_tiles", "warpgroup")},
}


@dataclass(frozen=True)
class Tile:
    """How a product of few rows is spread over threads, by whichever of its kernels."""

    # `"qmv"` for every GPU and dtype, `"qmv_serial"` and `"qmv_integers"` for CPUs; on the matrix
    # units `"qmv_matrix"`, `"qmv_persistent"`, whose SIMD groups take four runs of every row each,
    # and `"qmm_skinny"`, of up to 128 rows.
    kernel: str
    # Neighbours in a row of the matrix that a thread takes at once. Of qmv a multiple of 16, or of
    # 32 where `bits` is odd, that divides the group size; on the matrix units it divides K.
    run: int
    rows: int = 0  # of qmv, those that the kernel is compiled for; a product may have fewer
    outputs: int = 0  # of qmv, columns of the result that one SIMD group, or one thread, computes
    # Threads that share the columns: 32, or 1 where threads do not run side by side.
    lanes: int = 32
    # Of products with experts, float32 sums of a thread for each output; divides `run`.
    ways: int = 1
    local: int = 64  # of qmv, threads of a threadgroup; a multiple of `lanes`
    # Operands of 8 columns: rows of x, in qmv times the groups that the four lanes of a row of the
    # matrix take side by side (4 * run / group_size, in NVFP4 one).
    fragments: int = 0
    tiles: int = 1  # tiles of 16 rows of the matrix that a SIMD group computes
    simds_n: int = 1  # SIMD groups of a threadgroup along N, each with its own tiles
    simds_k: int = 1  # SIMD groups of a threadgroup along K, whose sums are added at the end
    # Runs of each row that a lane loads ahead, 1, 2 or 4. In qmm_skinny the K tiles that its loop
    # is unrolled by: with 2 no words are moved between registers, but the loop may outgrow the
    # instruction cache. With `stages` 0, the K tiles that are loaded ahead.
    ahead: int = 1
    # SIMD groups, of qmm_skinny threadgroups, that a core should have registers for at once, on
    # NVIDIA GPUs; 0 leaves that to the compiler.
    occupancy: int = 0
    # Of qmm_skinny, buffers for x in threadgroup memory, 1 or 2: one is filled while the other is
    # multiplied. With 0 `stage_tiles` of x are persistent there.
    stages: int = 1
    # Whether four SIMD groups multiply at once (a warpgroup), on Hopper GPUs: `simds_n` is a
    # multiple of 4, `fragments` a power of two.
    warpgroup: bool = False
    chunk: int = 1  # fragments of which sums are added at a time, at least
    block_tiles: int = 1  # K tiles whose scales are loaded at once: `group_size / run`, or 1
    # K tiles of x in a stage, behind one barrier; with `stages` 0 whole groups. A longer K is split
    # among threadgroups, and another launch adds their sums.
    stage_tiles: int = 1

    @property
    def units(self) -> bool:
        """Whether it is on the matrix units."""
        return self.kernel not in ("qmv", SERIAL, INTEGERS)

    @property
    def integers(self) -> bool:
        """Whether rows are rounded."""
        return self.kernel == INTEGERS

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simds_n * self.simds_k if self.units else self.local

    @property
    def resident(self) -> int:
        """Threadgroups that a core should hold at once."""
        simds = 1 if self.kernel == "qmm_skinny" else self.threads // 32
        return self.occupancy // simds

    def takes(self, k: int) -> bool:
        """Whether rows of so many elements are whole runs, and few enough for qmv_persistent."""
        enough = self.kernel != "qmv_persistent" or k <= 4 * self.run * self.simds_k
        return not self.units or (k % self.run == 0 and enough)

    def threadgroups(self, sizes: tuple[int, ...], gated: bool) -> int:
        """As many as matrices of so many rows take."""
        if self.units:
            return -(-sum(-(-n // 16) for n in sizes) // (self.tiles * self.simds_n))
        height = self.outputs // 2 if gated else self.outputs
        tiles = sum(-(-n // height) for n in (sizes[:1] if gated else sizes))
        return -(-tiles * self.lanes // self.local)

    def parts(self, k: int) -> int:
        """The threadgroups of qmm_skinny among which K is split."""
        return 1 if self.stages else -(-k // (4 * self.run * self.stage_tiles))

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, on NVIDIA GPUs."""
        persistent = self.stages == 0 and device_of().dynamic_memory > 0
        return _skinny_memory(**self._numbers()) if persistent else 0

    @property
    def runs(self) -> bool:
        """Whether this machine's GPU has so much shared memory."""
        return self.shared <= dynamic_memory()

    def template(self) -> dict[str, TemplateValue]:
        """The values of its kernel's parameters."""
        return {name: getattr(self, field) for name, field in PARAMETERS[self.kernel].items()}

    def _numbers(self) -> dict[str, Any]:
        """The same but for what depends on the device."""
        pairs = PARAMETERS[self.kernel].items()
        return {name: getattr(self, field) for name, field in pairs if name != "SHARED"}

    def memory(self, fmt: Format) -> int:
        """Bytes of threadgroup memory that its kernel declares, on the matrix units."""
        if self.kernel == "qmv_persistent":
            mode = list(MODES).index(fmt.mode)
            return persistent_memory(mode=mode, group=fmt.group_size, **self._numbers())
        of_kernel: Any = skinny_memory if self.kernel == "qmm_skinny" else matrix_memory
        return int(of_kernel(**self._numbers()))

    def paired(self) -> Tile:
        """With tiles in pairs, as a gate joins them."""
        if self.kernel != "qmm_skinny":
            return replace(self, tiles=self.tiles + self.tiles % 2)
        return replace(self, simds_n=self.simds_n + self.tiles * self.simds_n % 2)


def packed_template(fmt: Format, dtype: mx.Dtype, scales: mx.Dtype) -> dict[str, TemplateValue]:
    """Template arguments of kernels on packed matrices: dtypes of rows and scales, format."""
    mode = list(MODES).index(fmt.mode)
    return {"T": dtype, "S": scales, "mode": mode, "group": fmt.group_size, "bits": fmt.bits}


def whole_words(fmt: Format) -> int:
    """Elements of a row that a thread takes at once: 16, or as many as whole words hold."""
    return 32 if fmt.bits % 2 else 16


def dynamic_memory() -> int:
    """Bytes of shared memory that a threadgroup may ask for on NVIDIA GPUs."""
    return device_of("cuda").dynamic_memory - _DECLARED


def matrix_memory(*, simds_k: int, tiles: int, simds_n: int, fragments: int, **_: object) -> int:
    """Bytes that the kernel on the matrix units takes."""
    return 4 * simds_k * fragments * 8 * simds_n * (tiles * 16 + 1)


def persistent_memory(
    *, simds_k: int, tiles: int, fragments: int, mode: int, group: int, run: int, **_: object
) -> int:
    """The same of qmv_persistent."""
    slots = 1 if mode == _NVFP4 else 4 * run // group
    return 4 * simds_k * fragments * 8 * (tiles * 16 // slots + 1)


def registers(
    *, rows: int, outputs: int, run: int, ways: int = 1, normed: bool = False, **_: object
) -> int:
    """Words of the arrays of a thread of qmv: weights, sums, and squares of x or x itself."""
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
    """The same of qmv_persistent: of its tiles `ahead` are in registers, a run of each."""
    return matrix_registers(**told | {"tiles": ahead, "ahead": 1})


def skinny_memory(*, SHARED: int = 0, fragments: int, **told: int) -> int:
    """Bytes of threadgroup memory that are declared, by the values of the kernel's template."""
    return 32 * fragments + (0 if SHARED else _skinny_memory(fragments=fragments, **told))


def _skinny_memory(
    *,
    fragments: int,
    run: int,
    tiles: int,
    simds_n: int,
    simds_k: int,
    stages: int,
    chunk: int,
    stage_tiles: int,
    **_: object,
) -> int:
    """Bytes of K tiles of x, and later of sums."""
    x = 4 * (simds_k * stages or 1) * stage_tiles * fragments * run
    return -(-max(x, simds_k * 4 * tiles * simds_n * (8 * chunk + 2)) // 64) * 1024


def skinny_registers(
    *,
    group: int,
    bits: int,
    fragments: int,
    run: int,
    tiles: int,
    simds_n: int,
    stage_tiles: int,
    **_: object,
) -> int:
    """Words of the arrays of a thread: sums, packed words and numbers, x, and operands."""
    numbers = 6 * (run // 16 if group == 16 else 1)
    of_tile = 4 * fragments + 4 * run * bits // 32 + numbers + 4 + 8
    return tiles * of_tile + -(-stage_tiles * fragments // simds_n) * run // 2 + 4
