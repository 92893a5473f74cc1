"""How qmm_skinny, 9 to 128 rows times quantized matrices, is spread over threads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import mlx.core as mx

from ...formats import Format
from ...runtime.limits import CUDA_THREADGROUP_MEMORY

MAX_SKINNY_ROWS = 128
# Operands of 8 rows that the kernel is compiled for: each takes its time.
_FRAGMENTS = (2, 3, 4, 6, 8)


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
            multiplied.
        resident: threadgroups that a core should have registers for at once, on CUDA.
    """

    fragments: int
    run: int
    tiles: int
    sides: int
    shares: int
    stages: int = 2
    resident: int = 1

    template: ClassVar = ("fragments", "run", "tiles", "sides", "shares", "stages", "RESIDENT")

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.sides * self.shares

    def threadgroups(self, sizes: tuple[int, ...], gated: bool) -> int:
        """As many as matrices of so many rows take."""
        return -(-sum(-(-n // 16) for n in sizes) // (self.tiles * self.sides))

    def paired(self) -> SkinnyConfig:
        """With tiles in pairs, as a gate joins them."""
        odd = self.tiles * self.sides % 2
        return replace(self, sides=self.sides + 1) if odd else self


def skinny_config(
    device: str, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format
) -> SkinnyConfig:
    """The configuration for ``"metal"``, ``"cuda"`` or ``"host"``.

    Args:
        device: where it runs.
        rows: of x, 9 to 128.
        n: columns of the result, of all matrices.
        k: columns of x.
        dtype: of x, float16 or bfloat16.
        fmt: of the matrices.
    """
    fragments = next((f for f in _FRAGMENTS if 8 * f >= rows), _FRAGMENTS[-1])
    odd = fmt.bits % 2 == 1
    if device != "cuda":
        # M1 and M2 have registers for so many sums.
        return SkinnyConfig(min(fragments, 6 if odd else 8), 32 if odd else 16, 1, 4, 1, 1)
    run = 32 if odd or (fmt.bits < 8 and k % 32 == 0) else 16
    # The best of some twenty that were measured on an H200, in bfloat16 and 4 bits.
    if n <= 8192:
        spread = (1, 4, 2, 1, 2) if fragments <= 4 else (2, 2, 2, 1, 1)
    elif fragments <= 4:
        spread = (2, 6, 1, 2, 2) if fragments == 4 else (2, 4, 1, 2, 5 - fragments)
    else:
        spread = (2, 8, 1, 2, 1) if fragments == 6 else (2, 4, 1, 1, 2)
    config = SkinnyConfig(fragments, run, *spread)
    while skinny_memory(**asdict(config)) > CUDA_THREADGROUP_MEMORY:
        smaller = {"stages": 1} if config.stages > 1 else {"shares": config.shares // 2}
        config = replace(config, **smaller)
    return config


def skinny_memory(
    *, fragments: int, run: int, tiles: int, sides: int, shares: int, stages: int, **_: object
) -> int:
    """Bytes of threadgroup memory, by the values of the kernel's template."""
    x, sums = 4 * shares * stages * fragments * run, shares * 16 * tiles * sides * 10 // 4
    return 16 * max(x, sums) + 32 * fragments


def skinny_registers(
    *, group: int, bits: int, fragments: int, run: int, tiles: int, sides: int, **_: object
) -> int:
    """Words of the arrays of a thread: sums, packed words and numbers, x, and operands."""
    numbers = 6 * (run // 16 if group == 16 else 1)
    of_tile = 4 * fragments + 4 * run * bits // 32 + numbers + 4 + 8
    return tiles * of_tile + -(-fragments // sides) * run // 2 + 4
