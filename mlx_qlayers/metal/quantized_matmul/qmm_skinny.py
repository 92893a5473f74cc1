"""How qmm_skinny, 9 to 128 rows times quantized matrices, is spread over threads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from ...formats import Format
from ...measurements.thresholds import threshold
from ...runtime.devices import device_of

MAX_SKINNY_ROWS = 128
# Rows up to which products share what was measured.
SKINNY_ROWS = (16, 24, 32, 64, MAX_SKINNY_ROWS)
# Operands of 8 rows that the kernel is compiled for: each takes its time.
_FRAGMENTS = (2, 3, 4, 6, 8)
# Bytes that are declared beside dynamic shared memory, and aligned.
_DECLARED = 2048


@dataclass(frozen=True)
class SkinnyConfig:
    """How qmm_skinny is spread over SIMD groups.

    Attributes:
        fragments: operands of 8 rows of x, as many as a threadgroup has.
        run: neighbouring elements of a row of the matrix that a lane takes at once: 16, or 32, as
            it must be where ``bits`` is odd; it divides K.
        tiles: tiles of 16 rows of the matrix that a SIMD group computes.
        sides: SIMD groups side by side, which share x.
        shares: such groups of them, which share K.
        stages: windows of x in threadgroup memory, 1 or 2. With 2 one is filled while the other is
            multiplied; with 0 ``deep`` windows of x stay there.
        resident: threadgroups that a core should have registers for at once, on NVIDIA GPUs.
        turns: windows in the text of the kernel's loop, 1 or 2: with 2 no words are moved, but GPUs
            hold only so much text where they read instructions from. Where x stays, so many are
            under way.
        together: whether four SIMD groups multiply at once, on Hopper GPUs: ``sides`` is a multiple
            of 4, ``fragments`` a power of two.
        chunk: fragments of which sums are added at a time, at least.
        cover: windows whose numbers are read at once: ``group_size / run``, or 1.
        deep: windows of x in a stage, for which SIMD groups wait once; with ``stages`` 0 whole
            groups. Where K has more, threadgroups share it, and another launch adds their sums.
    """

    fragments: int
    run: int
    tiles: int
    sides: int
    shares: int
    stages: int = 2
    resident: int = 1
    turns: int = 2
    together: bool = False
    chunk: int = 1
    cover: int = 1
    deep: int = 1

    template: ClassVar = (
        *("fragments", "run", "tiles", "sides", "shares", "stages"),
        *("turns", "deep", "chunk", "cover", "together", "RESIDENT", "SHARED", "O"),
    )

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.sides * self.shares

    def parts(self, k: int) -> int:
        """Threadgroups that share so many columns of x."""
        return 1 if self.stages else -(-k // (4 * self.run * self.deep))

    @property
    def runs(self) -> bool:
        """Whether this machine's GPU has so much shared memory."""
        return self.shared <= _dynamic_memory()

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory, on NVIDIA GPUs."""
        stays = self.stages == 0 and device_of().dynamic_memory > 0
        return _memory(**asdict(self)) if stays else 0

    def threadgroups(self, sizes: tuple[int, ...], gated: bool) -> int:
        """As many as matrices of so many rows take."""
        return -(-sum(-(-n // 16) for n in sizes) // (self.tiles * self.sides))

    def paired(self) -> SkinnyConfig:
        """With tiles in pairs, as a gate joins them."""
        odd = self.tiles * self.sides % 2
        return replace(self, sides=self.sides + 1) if odd else self


def skinny_config(
    device: str, rows: int, n: int, k: int, fmt: Format, single: bool = False
) -> SkinnyConfig:
    """The configuration on a backend's device, in half precision.

    Args:
        device: the name of the backend.
        rows: of x, 9 to 128.
        n: columns of the result, of all matrices.
        k: columns of x.
        fmt: of the matrices.
        single: whether there is one matrix.
    """
    fragments = next((f for f in _FRAGMENTS if 8 * f >= rows), _FRAGMENTS[-1])
    odd = fmt.bits % 2 == 1
    if not device_of(device).tensor_cores:
        # M1 and M2 have registers for so many sums.
        return SkinnyConfig(min(fragments, 6 if odd else 8), 32 if odd else 16, 1, 4, 1, 1)
    if (stays := _staying(rows, n, k, fmt, single)) is not None:
        return stays
    # Four SIMD groups at once pay where there are many rows. A small matrix is read twice rather
    # than by half of the GPU.
    together, tiles_in_all = rows > 32, -(-n // 16)
    small = tiles_in_all <= 512
    if together:
        fragments = 4 if small else 8
    elif small:
        fragments = 2
    run = 32 if odd or (not together and fmt.bits < 8 and k % 32 == 0) else 16
    # All multiprocessors are busy to the end: as many tiles for each, in as few rounds as there are
    # registers for.
    processors = threshold("multiprocessors", device="cuda")
    work, most = tiles_in_all * -(-rows // (8 * fragments)), 20 if together else 18
    each = -(-work // (processors * -(-work // (processors * most))))
    tiles = 2 if each > 3 and not together else 1
    sides = -(-each // 4) * 4 if together else -(-each // tiles)
    shares = max(1, (16 if tiles == 1 else 9) // sides)
    config = SkinnyConfig(
        *(fragments, run, tiles, sides, shares),
        stages=2 if together or shares == 1 else 1,
        together=together,
        chunk=min(fragments, 4),
        cover=1 if fmt.mode == "nvfp4" else max(1, fmt.group_size // run),
    )
    while not _fits(config):
        if config.chunk > 1:
            config = replace(config, chunk=config.chunk - 1)
        else:
            config = replace(config, shares=config.shares - 1)
    # As many windows at a time as each SIMD group can fetch an operand of.
    while shares == 1 and 2 * config.deep * fragments <= sides:
        deeper = replace(config, deep=2 * config.deep)
        if not _fits(deeper):
            break
        config = deeper
    return config


def _staying(rows: int, n: int, k: int, fmt: Format, single: bool) -> SkinnyConfig | None:
    """Where an H200 was measured to be faster with rows that stay in shared memory.

    Each multiprocessor reads them first, which pays where it has seven tiles and more. Long rows of
    a single matrix that has fewer are divided until it has.
    """
    fragments, run = -(-rows // 8), 32 if fmt.bits < 8 else 16
    windows, of_window = -(-k // (4 * run)), 64 * run * fragments
    most = _dynamic_memory() // of_window
    parts = -(-windows // max(most, 1))
    processors = threshold("multiprocessors", device="cuda")
    if parts > 1:
        parts = max(parts, -(-6 * processors // -(-n // 16)))
    work = -(-n // 16) * parts
    each = -(-work // (processors * -(-work // (processors * 18))))
    divided = parts == 1 or (single and n < k and 2 * parts <= windows)
    if fragments > 4 or k % run or each < 7 or not divided:
        return None
    whole = max(1, fmt.group_size // (4 * run))
    return SkinnyConfig(
        *(fragments, run, 1, each, 18 // each),
        stages=0,
        chunk=2,
        cover=1 if fmt.mode == "nvfp4" else max(1, fmt.group_size // run),
        deep=-(-windows // (parts * whole)) * whole,
    )


def _fits(config: SkinnyConfig) -> bool:
    return skinny_memory(**asdict(config)) <= device_of("cuda").threadgroup_memory


def _dynamic_memory() -> int:
    return device_of("cuda").dynamic_memory - _DECLARED


def skinny_memory(*, SHARED: int = 0, fragments: int, **told: int) -> int:
    """Bytes of threadgroup memory that are declared, by the values of the kernel's template."""
    return 32 * fragments + (0 if SHARED else _memory(fragments=fragments, **told))


def _memory(
    *,
    fragments: int,
    run: int,
    tiles: int,
    sides: int,
    shares: int,
    stages: int,
    chunk: int,
    deep: int,
    **_: object,
) -> int:
    """Bytes of windows of x, and later of sums."""
    x = 4 * (shares * stages or 1) * deep * fragments * run
    return -(-max(x, shares * 4 * tiles * sides * (8 * chunk + 2)) // 64) * 1024


def skinny_registers(
    *,
    group: int,
    bits: int,
    fragments: int,
    run: int,
    tiles: int,
    sides: int,
    deep: int,
    **_: object,
) -> int:
    """Words of the arrays of a thread: sums, packed words and numbers, x, and operands."""
    numbers = 6 * (run // 16 if group == 16 else 1)
    of_tile = 4 * fragments + 4 * run * bits // 32 + numbers + 4 + 8
    return tiles * of_tile + -(-deep * fragments // sides) * run // 2 + 4
