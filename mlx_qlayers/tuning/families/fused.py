"""What one launch of few rows does besides a product, read from a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ...formats import Format
from ...metal.quantized_matmul.qmv import PackedMatrix, QmvConfig, QmvMatrixConfig, qmv
from ..family import Problem

_EPSILON = 1e-6


class Fused(NamedTuple):
    """Matrices that are multiplied with the same rows, and what stands around the products.

    Attributes:
        matrices: how many; they share the columns of the problem's shape evenly.
        norm: whether the rows go through an RMS norm first.
        gate: whether two products become silu(first) * second.
        residual: whether something is added to the product.
    """

    matrices: int
    norm: bool
    gate: bool
    residual: bool

    @classmethod
    def of(cls, problem: Problem) -> Fused:
        """Read what follows the format in a problem's form, as ``norm-3`` or ``residual``."""
        kinds = problem.form.split("-")[4:]
        count = next((int(kind) for kind in kinds if kind.isdecimal()), 1)
        gate = "gate" in kinds
        return cls(2 if gate else count, "norm" in kinds, gate, "residual" in kinds)

    def inputs(self, x: mx.array, packed: Sequence[mx.array]) -> list[mx.array]:
        """The rows, the norm's weight and the residual if there are any, and each matrix."""
        m, k = x.shape
        n = packed[0].shape[0] // self.matrices
        extra = [x]
        if self.norm:
            extra.append((1 + 0.1 * mx.random.normal((k,))).astype(x.dtype))
        if self.residual:
            extra.append(mx.random.normal((m, n)).astype(x.dtype))
        return extra + [
            mx.array(a[i * n : (i + 1) * n]) for i in range(self.matrices) for a in packed
        ]

    def launch(
        self, inputs: list[mx.array], fmt: Format, config: QmvConfig | QmvMatrixConfig
    ) -> mx.array:
        """One launch; of several results the last."""
        x, weight, residual, matrices = self._split(inputs)
        return qmv(
            x,
            [PackedMatrix(*matrix) for matrix in matrices],
            fmt,
            config,
            norm=(weight, _EPSILON) if self.norm else None,
            gate="silu" if self.gate else None,
            residual=residual,
        )[-1]

    def composed(self, inputs: list[mx.array], fmt: Format) -> mx.array:
        """The same by operators of MLX; all products, the last of which is the result."""
        x, weight, residual, matrices = self._split(inputs)
        if self.norm:
            x = mx.fast.rms_norm(x, weight, _EPSILON)
        *others, y = (mx.quantized_matmul(x, *_four(matrix), True, *fmt) for matrix in matrices)
        if self.gate:
            return others[0] * mx.sigmoid(others[0]) * y
        if residual is not None:
            return residual + y
        # Nothing is computed that nobody waits for.
        return mx.depends(y, others) if others else y

    def _split(
        self, inputs: list[mx.array]
    ) -> tuple[mx.array, mx.array | None, mx.array | None, list[list[mx.array]]]:
        x, *rest = inputs
        weight = rest.pop(0) if self.norm else None
        residual = rest.pop(0) if self.residual else None
        arrays = len(rest) // self.matrices
        return x, weight, residual, [rest[i : i + arrays] for i in range(0, len(rest), arrays)]


def _four(matrix: list[mx.array]) -> tuple[mx.array, mx.array, mx.array | None]:
    w, scales, *biases = matrix
    return w, scales, biases[0] if biases else None
