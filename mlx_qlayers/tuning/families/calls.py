"""Operations without options, as calibration sees them: nothing is searched."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import mlx.core as mx

from ...dispatch.calls import (
    CallProblem,
    ExpertsProblem,
    Fixed,
    GatherProblem,
    LatentProblem,
    RouterProblem,
)
from ...formats import Format
from ...metal.gather_qmm.gather_qmm import gather_qmm_sorted
from ...metal.gather_qmm.gather_qmv import Pairs
from ...metal.quantized_matmul.qmm_tensor import tensor_config
from ...ops.experts import experts_chosen, experts_combined, experts_products
from ...ops.gather_qmm import gather_qmm
from ...ops.latent_attention import latent_attention
from ...options import MatmulCall, PackedMatrix
from ...runtime import tensor_ops
from ...runtime.backend import backend, use_backend
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, exactly, normal
from .quantized_matmul import packed


class CallFamily(Family[CallProblem, Fixed]):
    """The operation itself, by its kernel and by stock operators."""

    def is_fixed(self, config: Any) -> bool:
        return True

    @abstractmethod
    def call(self, inputs: Inputs, problem: CallProblem) -> Inputs:
        """The operation on its inputs."""

    def bind(self, inputs: Inputs, problem: CallProblem, config: Fixed) -> Path:
        name = backend()

        def run(inputs: Inputs) -> Inputs:
            with use_backend(name):
                return self.call(inputs, problem)

        return run

    def stock(self, inputs: Inputs, problem: CallProblem) -> Inputs:
        with use_backend("ops"):
            return self.call(inputs, problem)


class ExpertsFamily(CallFamily):
    """Products with experts."""

    problem = ExpertsProblem

    def inputs(self, problem: CallProblem) -> Inputs:
        (rows, count, each, n, k), (mode, group, bits, kind) = problem.sizes, problem.form
        # Of others nothing is read; whether rows share experts stays as it is.
        count = min(count, 2 * rows * each)
        x = normal(problem.dtype, (rows, each, k) if kind in ("each", "sum") else (rows, k))
        chosen = mx.argsort(mx.random.uniform(shape=(rows, count)), axis=-1)[:, :each]
        found = [*x, chosen.astype(mx.uint32)]
        found += [mx.random.uniform(shape=(rows, each))] * (kind == "sum")
        for _ in range(1 + (kind in ("pair", "gate"))):
            parts = packed((count * n, k), problem.dtype, Format(group, bits, mode))
            found += [a.reshape(count, n, -1) for a in parts]
        return found

    def call(self, inputs: Inputs, problem: CallProblem) -> Inputs:
        (x, chosen, *rest), (mode, group, bits, kind) = inputs, problem.form
        fmt = Format(group, bits, mode)
        if kind == "sum":
            scores, *matrix = rest
            return [experts_combined(x, chosen, scores, PackedMatrix(*matrix), fmt)]
        each = len(rest) // (1 + (kind in ("pair", "gate")))
        matrices = [PackedMatrix(*rest[i : i + each]) for i in range(0, len(rest), each)]
        gate = "silu" if kind == "gate" else None
        return list(experts_products(x, chosen, matrices, fmt, gate))


class GatherFamily(CallFamily):
    """Products of rows sorted by expert, each of which as many chose."""

    problem = GatherProblem

    def inputs(self, problem: CallProblem) -> Inputs:
        (rows, count, n, k), (mode, group, bits) = problem.sizes, problem.form
        parts = packed((count * n, k), problem.dtype, Format(group, bits, mode))
        chosen = mx.arange(rows) * count // rows
        x, matrix = normal(problem.dtype, (rows, 1, k)), (a.reshape(count, n, -1) for a in parts)
        return [*x, chosen.astype(mx.uint32), *matrix]

    def call(self, inputs: Inputs, problem: CallProblem) -> Inputs:
        (x, chosen, w, scales, *biases), (mode, group, bits) = inputs, problem.form
        matrix = w, scales, biases[0] if biases else None
        # Rows in no order go one by one, so that no unit of TF32 has a part in the right result.
        form: Any = None, chosen, True, group, bits, mode
        return [gather_qmm(x, *matrix, *form, sorted_indices=not exactly.get())]

    def paths(self, inputs: Inputs, problem: CallProblem) -> dict[str, Path]:
        found = super().paths(inputs, problem)
        if backend() == "metal" and tensor_ops.missing() is None:
            (rows, count, _, k), (mode, group, bits) = problem.sizes, problem.form
            x, _, *matrix = map(Spec.of, inputs)
            call = MatmulCall(x, PackedMatrix(*matrix), True, Format(group, bits, mode))
            config = tensor_config(rows // count, k, problem.dtype, call.fmt, True)
            launch = gather_qmm_sorted(call, Pairs((rows,), 1, True), config)

            def by_tensors(inputs: Inputs) -> Inputs:
                x, chosen, w, scales, *biases = inputs
                return [launch(x, w, scales, biases[0] if biases else None, None, chosen, None)]

            found["tensor"] = by_tensors
        return found


class RouterFamily(CallFamily):
    """The choice of experts; what is compared are their shares, the largest first."""

    problem = RouterProblem

    def inputs(self, problem: CallProblem) -> Inputs:
        (rows, count), (_, biased, scaled) = problem.sizes, problem.form
        return normal(problem.dtype, (rows, count), *[(count,)] * (biased + scaled))

    def call(self, inputs: Inputs, problem: CallProblem) -> Inputs:
        (logits, *rest), (router, biased, scaled) = inputs, problem.form
        bias, factors = (rest.pop(0) if given else None for given in (biased, scaled))
        return [experts_chosen(logits, router, bias, factors)[1]]


class LatentFamily(CallFamily):
    """Attention to latent rows, all of which count."""

    problem = LatentProblem

    def inputs(self, problem: CallProblem) -> Inputs:
        rows, batch, heads, *widths = problem.sizes
        shapes = [(batch, heads, 1, n) for n in widths] + [(batch, 1, rows, n) for n in widths]
        return [*normal(problem.dtype, *shapes), mx.array(rows - 1)]

    def call(self, inputs: Inputs, problem: CallProblem) -> Inputs:
        q, r, c, p, last = inputs
        return [latent_attention(q, r, c, p, last, scale=sum(problem.sizes[3:]) ** -0.5)]
