"""The product of many rows with a packed matrix, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping

from ...dispatch.tunable import QmmProblem as Problem
from ...metal.quantized_matmul.qmm import QmmConfig, qmm, threadgroup_memory
from ...metal.quantized_matmul.qmv import PackedMatrix
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Inputs, Path, normal
from ..moves import Axis, Buffer, GroupTop, Local, Tile
from .packed import dense_product, matrices, packed_matrix, product, specs


class QmmFamily(Family[Problem, QmmConfig]):
    """y (M, N) = x (M, K) with a packed matrix, M of 17 and more."""

    problem = Problem
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

    def why_not(self, config: QmmConfig, problem: Problem) -> str | None:
        try:
            threads = config.threads(problem.dtype)
        except ValueError as error:
            return str(error)
        if threads > 256:
            return f"{threads} threads"
        tile = config.tile_m, config.tile_n, config.tile_k, config.stages
        memory = threadgroup_memory(problem.dtype, problem.transpose, *tile)
        if memory > MAX_THREADGROUP_MEMORY:
            return f"{memory} bytes of threadgroup memory"
        # A SIMD group keeps its part of the tile in registers, 32 floats to a row of 8 fragments.
        sums = config.tile_m * config.tile_n // threads
        return f"{sums} sums a thread" if sums > 128 else None

    def inputs(self, problem: Problem) -> Inputs:
        m, n, k = problem.m, problem.n, problem.k
        shape = (n, k) if problem.transpose else (k, n)
        return [*normal(problem.dtype, (m, k)), *packed_matrix(shape, problem.dtype, problem.fmt)]

    def bind(self, inputs: Inputs, problem: Problem, config: QmmConfig) -> Path:
        x, *matrix = specs([inputs[0], *matrices(inputs[1:], 1)[0]])
        launch = qmm(x, PackedMatrix(*matrix), problem.transpose, problem.fmt, config)
        return lambda inputs: launch(inputs[0], *matrices(inputs[1:], 1)[0])

    def paths(self, inputs: Inputs, problem: Problem) -> Mapping[str, Path]:
        transpose, fmt = problem.transpose, problem.fmt
        return {
            "stock": lambda inputs: product(inputs[0], matrices(inputs[1:], 1)[0], transpose, fmt),
            "dequantized": dense_product(inputs, transpose, fmt),
        }
