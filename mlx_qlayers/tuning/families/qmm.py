"""The tiled product of many rows with a quantized matrix, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap

import mlx.core as mx

from ...formats import Format
from ...metal.quantized_matmul import qmm as quantized_tiles
from ...metal.quantized_matmul.qmm import QmmConfig, qmm, qmm_config
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Problem
from ..lookup import rounded
from ..moves import Axis, Buffer, GroupTop, Local, Tile
from .packed import Packed, Path, four


class QmmFamily(Family[QmmConfig]):
    """y (M, N) = x (M, K) with a packed matrix, M of 17 and more; its form is ``affine-64-4-t``."""

    name = "qmm"
    configs = (QmmConfig,)
    kernels = (quantized_tiles.QMM, quantized_tiles.QMM_SUM)
    axes = (
        Axis(Tile, "tile_m", (16, 32, 48, 64, 96, 128)),
        Axis(Tile, "tile_n", (32, 64, 128, 256)),
        Axis(Tile, "tile_k", (32, 64, 128)),
        Axis(Local, "simds_m", (1, 2, 4)),
        Axis(Local, "simds_n", (1, 2, 4)),
        Axis(Buffer, "stages", (1, 2)),
        Axis(Buffer, "ahead", (False, True)),
        Axis(GroupTop, "parts", (1, 2, 4, 8)),
    )

    def heuristic(self, problem: Problem, device: str) -> QmmConfig:
        m, n, k, fmt, transpose = Packed.of(problem)
        return unwrap(qmm_config)(device, m, n, k, problem.dtype, fmt, transpose)

    def why_not(self, config: QmmConfig, problem: Problem) -> str | None:
        packed = Packed.of(problem)
        try:
            threads = config.threads(problem.dtype)
        except ValueError as error:
            return str(error)
        if threads > 256:
            return f"{threads} threads"
        memory = quantized_tiles.threadgroup_memory(
            problem.dtype,
            packed.transpose,
            config.tile_m,
            config.tile_n,
            config.tile_k,
            config.stages,
        )
        if memory > MAX_THREADGROUP_MEMORY:
            return f"{memory} bytes of threadgroup memory"
        # A SIMD group keeps its part of the tile in registers, 32 floats to a row of 8 fragments.
        sums = config.tile_m * config.tile_n // threads
        return f"{sums} sums a thread" if sums > 128 else None

    def inputs(self, problem: Problem) -> list[mx.array]:
        return Packed.of(problem).inputs(problem.dtype)

    def run(self, inputs: list[mx.array], problem: Problem, config: QmmConfig) -> mx.array:
        packed = Packed.of(problem)
        return qmm(*four(inputs), None, packed.transpose, packed.fmt, config)

    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        return Packed.of(problem).reference(inputs)

    def paths(self, problem: Problem) -> Mapping[str, Path]:
        return Packed.of(problem).paths()

    def registers(self, config: QmmConfig, problem: Problem) -> int:
        sums = config.tile_m * config.tile_n // config.threads(problem.dtype)
        return 48 + sums + config.run

    def part(self, problem: Problem) -> tuple[Problem, float]:
        return Packed.of(problem).part(problem.dtype, 256, 128)

    def asked(
        self, m: int, n: int, k: int, dtype: mx.Dtype, fmt: Format, transpose: bool
    ) -> Problem:
        return Packed(m, n, k, fmt, transpose).problem(dtype)

    def bucket(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        m, n, k = shape
        return rounded(m), n, k


QMM = QmmFamily()
