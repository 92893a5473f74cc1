"""The products with packed matrices, as the tuner sees them."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from ...dispatch.products import QmmProblem, QmvKind, QmvProblem
from ...dispatch.thresholds import threshold
from ...formats import Format
from ...metal.quantized_matmul import qmm, qmv
from ...metal.quantized_matmul.dequantize import dequantize
from ...metal.quantized_matmul.qmm import QmmConfig
from ...metal.quantized_matmul.qmm_tensor import why_no_codes
from ...metal.quantized_matmul.qmv import QmvArrays
from ...metal.quantized_matmul.qmv_config import QmvConfig, QmvPersistentConfig
from ...ops.tensor_choice import PATHS, tensor_product
from ...options import MatmulCall, PackedMatrix
from ...reference import quantized_matmul as reference
from ...runtime import tensor_ops
from ...runtime.backend import backend
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, in_parts, normal

Config = QmvConfig | QmvPersistentConfig
_EPSILON = 1e-6


class QmmFamily(Family[QmmProblem, QmmConfig]):
    """y (M, N) = x (M, K) with a packed matrix, M of 17 and more."""

    problem = QmmProblem

    def inputs(self, problem: QmmProblem) -> Inputs:
        m, n, k = problem.m, problem.n, problem.k
        shape = (n, k) if problem.transpose else (k, n)
        return [*normal(problem.dtype, (m, k)), *packed(shape, problem.dtype, problem.fmt)]

    def bind(self, inputs: Inputs, problem: QmmProblem, config: QmmConfig) -> Path:
        x, *packed = map(Spec.of, inputs)
        call = MatmulCall(x, PackedMatrix(*packed), problem.transpose, problem.fmt)
        launch = qmm.qmm(call, config)
        return lambda inputs: [launch(inputs[0], *PackedMatrix(*inputs[1:]))]

    def stock(self, inputs: Inputs, problem: QmmProblem) -> Inputs:
        return [_product(inputs[0], PackedMatrix(*inputs[1:]), problem.transpose, problem.fmt)]

    def paths(self, inputs: Inputs, problem: QmmProblem) -> dict[str, Path]:
        found = super().paths(inputs, problem)
        found["dequantized"] = _dense(inputs, problem.transpose, problem.fmt)
        if backend() == "metal" and tensor_ops.missing() is None:
            x, *packed = map(Spec.of, inputs)
            call = MatmulCall(x, PackedMatrix(*packed), problem.transpose, problem.fmt)
            codes = tensor_ops.missing_codes() is None and why_no_codes(call) is None
            for path in ("tensor", "codes") if codes else ("tensor",):
                found[path] = _by_tensors(PATHS[path], call)
        return found


class QmvFamily(Family[QmvProblem, Config]):
    """y (M, N) = x (M, K) with packed matrices, M of 1 to 16; norm, gate and residual with it.

    A configuration belongs to one of two kernels. Which is faster depends on what the matrix units
    of a GPU are worth, so the search starts from both.
    """

    problem = QmvProblem

    def inputs(self, problem: QmvProblem) -> Inputs:
        """The rows, the norm's weight and the residual if there are any, and each matrix."""
        kind, k, dtype = QmvKind.of(problem.kind), problem.k, problem.dtype
        n = problem.n // kind.matrices
        residual, weight = [(problem.rows, n)] * kind.residual, [(k,)] * kind.norm
        found = normal(dtype, (problem.rows, k), *weight, *residual)
        for _ in range(kind.matrices):
            found += packed((n, k), dtype, problem.fmt)
        return found

    def bind(self, inputs: Inputs, problem: QmvProblem, config: Config) -> Path:
        """One launch."""
        kind = QmvKind.of(problem.kind)
        launch = qmv.qmv(
            QmvArrays(*(None if a is None else Spec.of(a) for a in _arrays(inputs, kind))),
            problem.fmt,
            config,
            epsilon=_EPSILON if kind.norm else None,
            gate="silu" if kind.gate else None,
        )
        return lambda inputs: list(launch(*_arrays(inputs, kind)))

    def stock(self, inputs: Inputs, problem: QmvProblem) -> Inputs:
        kind = QmvKind.of(problem.kind)
        given = _arrays(inputs, kind)
        x: mx.array = given.x
        if kind.norm:
            x = mx.fast.rms_norm(x, given.norm_weight, _EPSILON)
        found = [_product(x, matrix, True, problem.fmt) for matrix in given.matrices]
        if kind.gate:
            return [found[0] * mx.sigmoid(found[0]) * found[1]]
        return [found[0] + given.residual] if kind.residual else found

    def paths(self, inputs: Inputs, problem: QmvProblem) -> dict[str, Path]:
        found = super().paths(inputs, problem)
        if QmvKind.of(problem.kind) == (1, False, False, False):
            found["dequantized"] = _dense(inputs, True, problem.fmt)
        return found

    def tolerances(self, problem: QmvProblem, outputs: int) -> list[float]:
        # Rounded rows make an error of each product, and a gate multiplies two of those.
        factor = 2 if QmvKind.of(problem.kind).norm else 1
        return [factor * each for each in super().tolerances(problem, outputs)]


def _arrays(inputs: Inputs, kind: QmvKind) -> QmvArrays:
    x, *rest = inputs
    weight = rest.pop(0) if kind.norm else None
    residual = rest.pop(0) if kind.residual else None
    each = len(rest) // kind.matrices
    starts = range(0, len(rest), each)
    packed = (a for i in starts for a in PackedMatrix(*rest[i : i + each]))
    return QmvArrays(x, weight, None, residual, None, *packed)


def packed(shape: tuple[int, int], dtype: mx.Dtype, fmt: Format) -> Inputs:
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
    product: Any = partial(reference.quantized_matmul, transpose=transpose, fmt=fmt)
    parts = (product(x[at], *matrix[:3], dense_rows=dense_rows) for at in in_parts(len(x)))
    return mx.concatenate(list(parts))


def _by_tensors(kernel: str, call: MatmulCall) -> Path:
    launch = tensor_product(kernel, call)
    return lambda inputs: [launch(inputs[0], *PackedMatrix(*inputs[1:]))]


def _dense(inputs: Inputs, transpose: bool, fmt: Format) -> Path:
    """The product of x with one matrix, which is dequantized first."""
    unpack = dequantize([PackedMatrix(*map(Spec.of, inputs[1:]))], fmt, inputs[0].dtype)

    def run(inputs: Inputs) -> Inputs:
        dense = unpack(*inputs[1:])
        return [inputs[0] @ (dense.T if transpose else dense)]

    return run
