"""qmv, with norm, gate and residual in its launch, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import NamedTuple

import mlx.core as mx

from ...dispatch.tunable import QmvProblem as Problem
from ...metal.quantized_matmul import qmv as metal
from ...metal.quantized_matmul.qmv import QmvArrays, QmvConfig, QmvMatrixConfig, qmv_config
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Inputs, Path, normal
from ..moves import Axis, Buffer, Group, Local, Unroll, Upcast
from .packed import dense_product, matrices, packed_matrix, product, specs

Config = QmvConfig | QmvMatrixConfig
# Beyond these a thread's sums and weights cannot stay in registers.
_MOST_SUMS, _MOST_PRODUCTS = 32, 128
_EPSILON = 1e-6


class _Kind(NamedTuple):
    """What a launch does: so many matrices, an RMS norm first, silu(first) * second, a sum."""

    matrices: int
    norm: bool
    gate: bool
    residual: bool

    @classmethod
    def of(cls, problem: Problem) -> _Kind:
        words = problem.kind.split("-")
        count = next((int(word) for word in words if word.isdecimal()), 1)
        gate = "gate" in words
        return cls(2 if gate else count, "norm" in words, gate, "residual" in words)


class QmvFamily(Family[Problem, Config]):
    """y (M, N) = x (M, K) with packed matrices, M of 1 to 16.

    A configuration belongs to one of two kernels. Which is faster depends on what the matrix units
    of a GPU are worth, so the search starts from both.
    """

    problem = Problem
    axes = (
        Axis(Group, "simds", (1, 2, 4, 8, 16)),
        Axis(Upcast, "tiles", (1, 2, 4)),
        Axis(Upcast, "outputs", (1, 2, 4, 8)),
        Axis(Unroll, "run", (8, 16, 32, 64)),
        Axis(Buffer, "ahead", (1, 2, 4)),
        Axis(Local, "stacks", (1, 2)),
        Axis(Local, "threads", (32, 64, 128, 256)),
    )

    def others(self, problem: Problem, device: str) -> tuple[Config, ...]:
        if device != "metal":  # on CUDA matrix units are worth ten times the other ones
            return ()
        shape, fmt = (problem.rows, problem.n, problem.k), problem.fmt
        threads = qmv_config("metal", *shape, mx.float32, fmt)
        if problem.dtype == mx.float32:
            return (threads,)
        return qmv_config("cuda", *shape, mx.bfloat16, fmt), threads

    def completed(self, config: Config, problem: Problem) -> Config:
        if isinstance(config, QmvConfig):
            return config
        fragments = -(-problem.rows * _slots(config, problem) // 8)
        # A gate joins tiles in pairs.
        tiles = config.tiles + config.tiles % 2 * _Kind.of(problem).gate
        return replace(config, fragments=fragments, tiles=tiles)

    def why_not(self, config: Config, problem: Problem) -> str | None:
        if config.threads > 1024:
            return f"{config.threads} threads"
        if isinstance(config, QmvMatrixConfig):
            return _why_not_units(config, problem)
        if _Kind.of(problem).gate and config.outputs % 2:
            return "a gate joins outputs in pairs"
        group, bits, _ = problem.fmt
        if config.run % (32 if bits % 2 else 16) or group % config.run or config.run % config.ways:
            return f"runs of {config.run} in groups of {group}"
        products = config.run * max(config.rows, config.outputs)
        sums = config.rows * config.outputs
        if config.lanes > 1 and max(products / 2, sums) > _MOST_PRODUCTS:
            return f"{sums} sums, {products} products"
        return None

    def inputs(self, problem: Problem) -> Inputs:
        """The rows, the norm's weight and the residual if there are any, and each matrix."""
        kind, k, dtype = _Kind.of(problem), problem.k, problem.dtype
        n = problem.n // kind.matrices
        residual, weight = [(problem.rows, n)] * kind.residual, [(k,)] * kind.norm
        found = normal(dtype, (problem.rows, k), *weight, *residual)
        for _ in range(kind.matrices):
            found += packed_matrix((n, k), dtype, problem.fmt)
        return found

    def bind(self, inputs: Inputs, problem: Problem, config: Config) -> Path:
        """One launch; of several results the last."""
        kind = _Kind.of(problem)
        launch = metal.qmv(
            QmvArrays(*specs(_arrays(inputs, kind))),
            problem.fmt,
            config,
            epsilon=_EPSILON if kind.norm else None,
            gate="silu" if kind.gate else None,
        )
        return lambda inputs: launch(*_arrays(inputs, kind))[-1]

    def paths(self, inputs: Inputs, problem: Problem) -> Mapping[str, Path]:
        kind, fmt = _Kind.of(problem), problem.fmt

        def stock(inputs: Inputs) -> mx.array:
            given = _arrays(inputs, kind)
            x: mx.array = given.x
            if kind.norm:
                x = mx.fast.rms_norm(x, given.norm_weight, _EPSILON)
            *others, y = (product(x, matrix, True, fmt) for matrix in given.matrices)
            if kind.gate:
                return others[0] * mx.sigmoid(others[0]) * y
            if kind.residual:
                return y + given.residual
            # Nothing is computed that nobody waits for.
            return mx.depends(y, others) if others else y

        if kind != (1, False, False, False):
            return {"stock": stock}
        return {"stock": stock, "dequantized": dense_product(inputs, True, fmt)}

    def tolerance(self, problem: Problem) -> float:
        # Rounded rows make an error of each product, and a gate multiplies two of those.
        return super().tolerance(problem) * (2 if _Kind.of(problem).norm else 1)


def _arrays(inputs: Inputs, kind: _Kind) -> QmvArrays:
    x, *rest = inputs
    weight = rest.pop(0) if kind.norm else None
    residual = rest.pop(0) if kind.residual else None
    packed = chain.from_iterable(matrices(rest, kind.matrices))
    return QmvArrays(x, weight, None, residual, None, *packed)


def _slots(config: QmvMatrixConfig, problem: Problem) -> int:
    return 1 if problem.fmt.mode == "nvfp4" else 4 * config.run // problem.fmt.group_size


def _why_not_units(config: QmvMatrixConfig, problem: Problem) -> str | None:
    group, bits, mode = problem.fmt
    if mode == "nvfp4":
        if config.run != (16 if problem.k % 32 else 32) or config.ahead > 1:
            return f"{config} in nvfp4"
    else:
        least = max(group // 4, {2: 16, 4: 8, 6: 16, 8: 4}.get(bits, 32))
        if not least <= config.run <= group or _slots(config, problem) > 8:
            return f"runs of {config.run} in groups of {group}"
    if not config.takes(problem.k):
        return f"rows of {problem.k}"
    memory = metal._threadgroup_memory(**asdict(config))
    if memory > MAX_THREADGROUP_MEMORY:
        return f"{memory} bytes of threadgroup memory"
    sums = config.tiles * config.fragments
    words = config.tiles * config.ahead * config.run * bits // 16
    if sums > _MOST_SUMS or words > _MOST_PRODUCTS:
        return f"{sums} fragments and {words} words under way"
    return None
