"""What can be tuned of the products with packed matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..formats import Format
from ..metal.attention.layout import rounded
from ..metal.quantized_matmul import qmm, qmv
from ..metal.quantized_matmul.qmm_tensor import codes_config, tensor_config
from ..metal.quantized_matmul.qmv_config import (
    QmvConfig,
    QmvMatrixConfig,
    QmvPersistentConfig,
    matrix_config,
    qmv_config,
    units_memory,
)
from ..runtime.kernel import Kernel
from .problem import CALIBRATED_PROMPTS, CALIBRATED_ROWS, Problem, form_of, too_much

# Beyond these a thread's sums and weights cannot stay in registers.
_MOST_SUMS, _MOST_PRODUCTS = 32, 128
QmvAny = QmvConfig | QmvPersistentConfig


def matrix_bytes(n: int, k: int, fmt: Format) -> float:
    """What packed matrices of so many rows and columns take."""
    return n * k * (fmt.bits + 32 / fmt.group_size) / 8


class QmvKind(NamedTuple):
    """What a launch does: so many matrices, an RMS norm first, silu(first) * second, a sum."""

    matrices: int
    norm: bool
    gate: bool
    residual: bool

    @classmethod
    def of(cls, kind: str) -> QmvKind:
        """What a problem's kind names, as ``"norm-3"``."""
        words = kind.split("-")
        count = next((int(word) for word in words if word.isdecimal()), 1)
        return cls(2 if "gate" in words else count, *(w in words for w in cls._fields[1:]))


@dataclass(frozen=True)
class QmvProblem(Problem):
    """1 to 16 rows times packed matrices, transposed.

    Attributes:
        rows, n, k: the shape; n counts the columns of all matrices.
        dtype: of the rows.
        fmt: of the matrices.
        kind: what else the launch does: ``norm``, ``gate``, ``residual`` and the number of
            matrices, joined by ``-``.
    """

    rows: int
    n: int
    k: int
    dtype: mx.Dtype
    fmt: Format
    kind: str = ""
    family, sized, sizes_measured = "qmv", "rows", CALIBRATED_ROWS
    configs = (QmvMatrixConfig, QmvPersistentConfig, QmvConfig)
    values: ClassVar = {
        "simds": (1, 2, 4, 8, 16),
        "tiles": (1, 2, 4),
        "outputs": (1, 2, 4, 8),
        "run": (8, 16, 32, 64),
        "ahead": (1, 2, 4),
        "stacks": (1, 2),
        "threads": (32, 64, 128, 256),
    }

    def heuristic(self, device: str) -> QmvAny:
        shape = self.rows, self.n, self.k
        return qmv_config(device, *shape, self.dtype, self.fmt, self.kind)

    def starts(self, device: str) -> tuple[QmvAny, ...]:
        # Which kernel is faster depends on what the matrix units of a GPU are worth: ten times the
        # other ones on CUDA.
        first = self.heuristic(device)
        if type(first) is QmvPersistentConfig:
            shape = self.rows, self.n, self.k
            return first, matrix_config(device, *shape, self.fmt, QmvKind.of(self.kind).norm)
        if device != "metal":
            return (first,)
        threads = replace(self, dtype=mx.float32, kind="").heuristic("metal")
        if self.dtype == mx.float32:
            return first, threads
        return first, replace(self, dtype=mx.bfloat16, kind="").heuristic("cuda"), threads

    def completed(self, config: QmvAny) -> QmvAny:
        if isinstance(config, QmvConfig):
            return config
        fragments = -(-self.rows * self._slots(config) // 8)
        # A gate joins tiles in pairs.
        tiles = config.tiles + config.tiles % 2 * QmvKind.of(self.kind).gate
        return replace(config, fragments=fragments, tiles=tiles)

    def why_not(self, config: QmvAny) -> str | None:
        if config.threads > 1024:
            return f"{config.threads} threads"
        if isinstance(config, QmvPersistentConfig):
            return self._why_not_units(config)
        if QmvKind.of(self.kind).gate and config.outputs % 2:
            return "a gate joins outputs in pairs"
        group, bits, _ = self.fmt
        if config.run % (32 if bits % 2 else 16) or group % config.run or config.run % config.ways:
            return f"runs of {config.run} in groups of {group}"
        products = config.run * max(config.rows, config.outputs)
        sums = config.rows * config.outputs
        if config.lanes > 1 and max(products / 2, sums) > _MOST_PRODUCTS:
            return f"{sums} sums, {products} products"
        return None

    def _slots(self, config: QmvPersistentConfig) -> int:
        return 1 if self.fmt.mode == "nvfp4" else 4 * config.run // self.fmt.group_size

    def _why_not_units(self, config: QmvPersistentConfig) -> str | None:
        group, bits, mode = self.fmt
        if mode == "nvfp4":
            if config.run != (16 if self.k % 32 else 32) or config.ahead > 1:
                return f"{config} in nvfp4"
        else:
            if not max(group // 4, 8) <= config.run <= group or self._slots(config) > 8:
                return f"runs of {config.run} in groups of {group}"
        if not config.takes(self.k):
            return f"rows of {self.k}"
        if why := too_much(units_memory(config, self.fmt)):
            return why
        # Of tiles whose threadgroup stays one at a time has sums in registers.
        tiles = config.tiles if isinstance(config, QmvMatrixConfig) else 1
        sums = tiles * config.fragments
        words = tiles * config.ahead * config.run * bits // 16
        if sums > _MOST_SUMS or words > _MOST_PRODUCTS:
            return f"{sums} fragments and {words} words under way"
        return None

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(qmv._kernel(kind, ()) for kind in self.configs)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        form = form_of(self.fmt, True) + ("-" + self.kind if self.kind else "")
        return (self.rows, self.n, self.k), form

    def bytes(self) -> float:
        return matrix_bytes(self.n, self.k, self.fmt)


@dataclass(frozen=True)
class QmmProblem(Problem):
    """17 rows and more times a packed matrix."""

    m: int
    n: int
    k: int
    dtype: mx.Dtype
    fmt: Format
    transpose: bool
    family, sized, sizes_measured = "qmm", "m", CALIBRATED_PROMPTS
    configs = (qmm.QmmConfig,)
    values: ClassVar = {
        "tile_m": (16, 32, 48, 64, 96, 128),
        "tile_n": (32, 64, 96, 128, 256),
        "tile_k": (32, 64, 128),
        "simds_m": (1, 2, 4),
        "simds_n": (1, 2, 4),
        "stages": (1, 2),
        "ahead": (False, True),
        "parts": (1, 2, 4, 8),
    }

    def heuristic(self, device: str) -> qmm.QmmConfig:
        shape = self.m, self.n, self.k
        return qmm.qmm_config(device, *shape, self.dtype, self.fmt, self.transpose)

    def admits(self, name: str) -> Sequence[int]:
        # The heuristic's depends on the number of rows, of which a bucket has several.
        return range(1, max(8, self.k // 512) + 1) if name == "parts" else super().admits(name)

    def why_not(self, config: qmm.QmmConfig) -> str | None:
        try:
            threads = config.threads(self.dtype)
        except ValueError as error:
            return str(error)
        if threads > 256:
            return f"{threads} threads"
        tile = config.tile_m, config.tile_n, config.tile_k, config.stages
        if why := too_much(qmm.threadgroup_memory(self.dtype, self.transpose, *tile)):
            return why
        # A SIMD group keeps its part of the tile in registers, 32 floats to a row of 8 fragments.
        sums = config.tile_m * config.tile_n // threads
        return f"{sums} sums a thread" if sums > 128 else None

    def kernels(self) -> tuple[Kernel, ...]:
        return qmm.QMM, qmm.QMM_SUM

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (rounded(self.m), self.n, self.k), form_of(self.fmt, self.transpose)

    def variant(self, config: qmm.QmmConfig) -> Any:
        """With those of the kernels that run on tensor operations."""
        rest = self.k, self.dtype, self.fmt, self.transpose
        return config, tensor_config(self.m, *rest), codes_config(self.m)

    def bytes(self) -> float:
        return matrix_bytes(self.n, self.k, self.fmt)

    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k
