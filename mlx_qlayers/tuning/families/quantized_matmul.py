"""The products with packed matrices, as the tuner sees them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import NamedTuple

import mlx.core as mx

from ...dispatch.measurements import threshold
from ...dispatch.tunable import QmmProblem, QmvProblem
from ...formats import Format
from ...metal.quantized_matmul import qmm, qmv
from ...metal.quantized_matmul.dequantize import dequantize
from ...metal.quantized_matmul.qmm import QmmConfig
from ...metal.quantized_matmul.qmv import QmvArrays, QmvConfig, QmvMatrixConfig
from ...options import MatmulCall, PackedMatrix
from ...reference import quantized_matmul as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal
from ..moves import Buffer, Group, GroupTop, Local, Tile, Unroll, Upcast

Config = QmvConfig | QmvMatrixConfig
# Beyond these a thread's sums and weights cannot stay in registers.
_MOST_SUMS, _MOST_PRODUCTS = 32, 128
_EPSILON = 1e-6


class QmmFamily(Family[QmmProblem, QmmConfig]):
    """y (M, N) = x (M, K) with a packed matrix, M of 17 and more."""

    problem = QmmProblem
    moves = (
        Tile("tile_m", (16, 32, 48, 64, 96, 128)),
        Tile("tile_n", (32, 64, 128, 256)),
        Tile("tile_k", (32, 64, 128)),
        Local("simds_m", (1, 2, 4)),
        Local("simds_n", (1, 2, 4)),
        Buffer("stages", (1, 2)),
        Buffer("ahead", (False, True)),
        GroupTop("parts", (1, 2, 4, 8)),
    )

    def why_not(self, config: QmmConfig, problem: QmmProblem) -> str | None:
        try:
            threads = config.threads(problem.dtype)
        except ValueError as error:
            return str(error)
        if threads > 256:
            return f"{threads} threads"
        tile = config.tile_m, config.tile_n, config.tile_k, config.stages
        memory = qmm.threadgroup_memory(problem.dtype, problem.transpose, *tile)
        if memory > MAX_THREADGROUP_MEMORY:
            return f"{memory} bytes of threadgroup memory"
        # A SIMD group keeps its part of the tile in registers, 32 floats to a row of 8 fragments.
        sums = config.tile_m * config.tile_n // threads
        return f"{sums} sums a thread" if sums > 128 else None

    def inputs(self, problem: QmmProblem) -> Inputs:
        m, n, k = problem.m, problem.n, problem.k
        shape = (n, k) if problem.transpose else (k, n)
        return [*normal(problem.dtype, (m, k)), *_packed(shape, problem.dtype, problem.fmt)]

    def bind(self, inputs: Inputs, problem: QmmProblem, config: QmmConfig) -> Path:
        x, *packed = map(Spec.of, inputs)
        call = MatmulCall(x, PackedMatrix(*packed), problem.transpose, problem.fmt)
        launch = qmm.qmm(call, config)
        return lambda inputs: launch(inputs[0], *PackedMatrix(*inputs[1:]))

    def stock(self, inputs: Inputs, problem: QmmProblem) -> mx.array:
        return _product(inputs[0], PackedMatrix(*inputs[1:]), problem.transpose, problem.fmt)

    def paths(self, inputs: Inputs, problem: QmmProblem) -> dict[str, Path]:
        dense = _dense(inputs, problem.transpose, problem.fmt)
        return super().paths(inputs, problem) | {"dequantized": dense}


class _Kind(NamedTuple):
    """What a launch does: so many matrices, an RMS norm first, silu(first) * second, a sum."""

    matrices: int
    norm: bool
    gate: bool
    residual: bool

    @classmethod
    def of(cls, problem: QmvProblem) -> _Kind:
        words = problem.kind.split("-")
        count = next((int(word) for word in words if word.isdecimal()), 1)
        gate = "gate" in words
        return cls(2 if gate else count, "norm" in words, gate, "residual" in words)


class QmvFamily(Family[QmvProblem, Config]):
    """y (M, N) = x (M, K) with packed matrices, M of 1 to 16; norm, gate and residual with it.

    A configuration belongs to one of two kernels. Which is faster depends on what the matrix units
    of a GPU are worth, so the search starts from both.
    """

    problem = QmvProblem
    moves = (
        Group("simds", (1, 2, 4, 8, 16)),
        Upcast("tiles", (1, 2, 4)),
        Upcast("outputs", (1, 2, 4, 8)),
        Unroll("run", (8, 16, 32, 64)),
        Buffer("ahead", (1, 2, 4)),
        Local("stacks", (1, 2)),
        Local("threads", (32, 64, 128, 256)),
    )

    def others(self, problem: QmvProblem, device: str) -> tuple[Config, ...]:
        if device != "metal":  # on CUDA matrix units are worth ten times the other ones
            return ()
        shape, fmt = (problem.rows, problem.n, problem.k), problem.fmt
        threads = qmv.qmv_config("metal", *shape, mx.float32, fmt)
        if problem.dtype == mx.float32:
            return (threads,)
        return qmv.qmv_config("cuda", *shape, mx.bfloat16, fmt), threads

    def completed(self, config: Config, problem: QmvProblem) -> Config:
        if isinstance(config, QmvConfig):
            return config
        fragments = -(-problem.rows * _slots(config, problem) // 8)
        # A gate joins tiles in pairs.
        tiles = config.tiles + config.tiles % 2 * _Kind.of(problem).gate
        return replace(config, fragments=fragments, tiles=tiles)

    def why_not(self, config: Config, problem: QmvProblem) -> str | None:
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

    def inputs(self, problem: QmvProblem) -> Inputs:
        """The rows, the norm's weight and the residual if there are any, and each matrix."""
        kind, k, dtype = _Kind.of(problem), problem.k, problem.dtype
        n = problem.n // kind.matrices
        residual, weight = [(problem.rows, n)] * kind.residual, [(k,)] * kind.norm
        found = normal(dtype, (problem.rows, k), *weight, *residual)
        for _ in range(kind.matrices):
            found += _packed((n, k), dtype, problem.fmt)
        return found

    def bind(self, inputs: Inputs, problem: QmvProblem, config: Config) -> Path:
        """One launch; of several results the last."""
        kind = _Kind.of(problem)
        launch = qmv.qmv(
            QmvArrays(*(None if a is None else Spec.of(a) for a in _arrays(inputs, kind))),
            problem.fmt,
            config,
            epsilon=_EPSILON if kind.norm else None,
            gate="silu" if kind.gate else None,
        )
        return lambda inputs: launch(*_arrays(inputs, kind))[-1]

    def stock(self, inputs: Inputs, problem: QmvProblem) -> mx.array:
        kind = _Kind.of(problem)
        given = _arrays(inputs, kind)
        x: mx.array = given.x
        if kind.norm:
            x = mx.fast.rms_norm(x, given.norm_weight, _EPSILON)
        *others, y = (_product(x, matrix, True, problem.fmt) for matrix in given.matrices)
        if kind.gate:
            return others[0] * mx.sigmoid(others[0]) * y
        if kind.residual:
            return y + given.residual
        # Nothing is computed that nobody waits for.
        return mx.depends(y, others) if others else y

    def paths(self, inputs: Inputs, problem: QmvProblem) -> dict[str, Path]:
        found = super().paths(inputs, problem)
        if _Kind.of(problem) == (1, False, False, False):
            found["dequantized"] = _dense(inputs, True, problem.fmt)
        return found

    def tolerance(self, problem: QmvProblem) -> float:
        # Rounded rows make an error of each product, and a gate multiplies two of those.
        return super().tolerance(problem) * (2 if _Kind.of(problem).norm else 1)


def _arrays(inputs: Inputs, kind: _Kind) -> QmvArrays:
    x, *rest = inputs
    weight = rest.pop(0) if kind.norm else None
    residual = rest.pop(0) if kind.residual else None
    each = len(rest) // kind.matrices
    starts = range(0, len(rest), each)
    packed = (a for i in starts for a in PackedMatrix(*rest[i : i + each]))
    return QmvArrays(x, weight, None, residual, None, *packed)


def _slots(config: QmvMatrixConfig, problem: QmvProblem) -> int:
    return 1 if problem.fmt.mode == "nvfp4" else 4 * config.run // problem.fmt.group_size


def _why_not_units(config: QmvMatrixConfig, problem: QmvProblem) -> str | None:
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
    memory = qmv._threadgroup_memory(**asdict(config))
    if memory > MAX_THREADGROUP_MEMORY:
        return f"{memory} bytes of threadgroup memory"
    sums = config.tiles * config.fragments
    words = config.tiles * config.ahead * config.run * bits // 16
    if sums > _MOST_SUMS or words > _MOST_PRODUCTS:
        return f"{sums} fragments and {words} words under way"
    return None


def _packed(shape: tuple[int, int], dtype: mx.Dtype, fmt: Format) -> Inputs:
    """A random matrix: w, scales and, in mode affine, biases."""
    (n, k), (group, bits, mode) = shape, fmt
    w = mx.random.randint(0, 2**32 - 1, (n, k * bits // 32), mx.uint32)
    groups = n, k // group
    if mode == "affine":
        scales = (mx.random.uniform(0.5, 1, groups) * 2**-bits * k**-0.5).astype(dtype)
        return [w, scales, -(2 ** (bits - 1)) * scales]
    # Exponents around 2^-6, in NVFP4 numbers around 2^-4; no codes that are not numbers.
    low, high = (16, 32) if mode == "nvfp4" else (119, 123)
    return [w & 0xBFBFBFBF if bits == 8 else w, mx.random.randint(low, high, groups, mx.uint8)]


def _product(x: mx.array, matrix: PackedMatrix, transpose: bool, fmt: Format) -> mx.array:
    order = "transposed" if transpose else "plain"
    dense_rows = threshold("reference_dense_rows", fmt.mode, fmt.bits, order, device="host")
    return reference.quantized_matmul(x, *matrix[:3], transpose, fmt, dense_rows)


def _dense(inputs: Inputs, transpose: bool, fmt: Format) -> Path:
    """The product of x with one matrix, which is dequantized first."""
    unpack = dequantize([PackedMatrix(*map(Spec.of, inputs[1:]))], fmt, inputs[0].dtype)

    def run(inputs: Inputs) -> mx.array:
        dense = unpack(*inputs[1:])
        return inputs[0] @ (dense.T if transpose else dense)

    return run
