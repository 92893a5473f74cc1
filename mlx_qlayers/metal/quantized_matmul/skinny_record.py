"""The record of 9 to 128 rows times packed matrices. For NVIDIA GPUs alone, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from . import qmv
from .qmm_skinny import SKINNY_ROWS, skinny_config
from .records import QmvKind, QmvRecord
from .tile import Tile


@dataclass(frozen=True)
class SkinnyRecord(QmvRecord):
    """9 to 128 rows in half precision times packed matrices, transposed: not searched yet."""

    family, of_backend, values = "qmm_skinny", True, {}
    sizes_measured = ()

    def heuristic(self, device: str) -> Tile:
        single = QmvKind.of(self.kind).matrices == 1
        return skinny_config(device, self.rows, self.n, self.k, self.fmt, single)

    def starts(self, device: str) -> tuple[Tile, ...]:
        return (self.heuristic(device),)

    def admits(self, name: str) -> Sequence[int]:
        return (False, True) if name == "warpgroup" else range(-(-self.k // 64) + 1)

    def completed(self, config: Tile) -> Tile:
        return config

    def why_not(self, config: Tile) -> str | None:
        blocks = 1, self.fmt.group_size // config.run
        if self.k % config.run or config.block_tiles not in blocks:
            return f"runs of {config.run}, {config.block_tiles} of them, in rows of {self.k}"
        # Whether a GPU has room for rows that stay is asked where the configuration is taken.
        used = config.memory(self.fmt) if config.stages else 0
        if used > device_of("cuda").threadgroup_memory:
            return f"{used} bytes of threadgroup memory"
        return None

    def kernels(self) -> tuple[Kernel, ...]:
        return qmv.kernel_of("qmm_skinny"), qmv.SUM

    def bucket(self) -> tuple[tuple[int, ...], str]:
        (_, *shape), form = super().bucket()
        return (next(n for n in SKINNY_ROWS if self.rows <= n), *shape), form
