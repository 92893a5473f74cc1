"""The records of products with experts, of few rows and of many, and of the choice of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from ...formats import Format
from ...options import MatmulCall, PackedMatrix, Router
from ...reference import gather_qmm as reference
from ...reference.experts import experts_chosen
from ...runtime import tensor_ops
from ...runtime.backend import backend
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..quantized_matmul.qmm_tensor import TensorConfig, tensor_config
from ..quantized_matmul.records import matrix_bytes, packed
from ..record import (
    CALIBRATED_PROMPTS,
    CallRecord,
    Fixed,
    Inputs,
    Path,
    Record,
    exactly,
    normal,
    rounded,
)
from . import experts, gather_qmm
from .gather_qmv import Pairs, configuration, gather_qmv


class ExpertsRecord(CallRecord):
    """Products with experts: of rows, experts, experts of a row, N, K; a format and a kind.

    Of one matrix (``one``), of two (``pair``), of these gated (``gate``), of a row for each expert
    (``each``), or of such rows, added up by scores (``sum``).
    """

    family = "experts"

    def kernels(self) -> tuple[Kernel, ...]:
        return (experts.COMBINED if self.form[-1] == "sum" else experts.PRODUCTS,)

    def variant(self, config: Any) -> bool:
        rows, count, each, *_ = self.sizes
        return experts.share_experts((rows, each), count)

    def calibrated(self) -> Iterator[Record]:
        every = map(self.at, self.sizes_measured)
        if self.form[-1] not in ("each", "sum"):
            return every
        # Where rows seldom share experts sums take the place of the products.
        kinds = {True: "each", False: "sum"}
        return (replace(e, form=(*self.form[:-1], kinds[e.variant(None)])) for e in every)

    def bytes(self) -> float:
        (rows, count, each, n, k), kind = self.sizes, self.form[-1]
        matrices = min(rows * each, count) * (1 + (kind in ("pair", "gate")))
        return matrices * matrix_bytes(n, k, self.fmt)

    def inputs(self) -> Inputs:
        (rows, count, each, n, k), kind = self.sizes, self.form[-1]
        # Of others nothing is read; whether rows share experts stays as it is.
        count = min(count, 2 * rows * each)
        x = normal(self.dtype, (rows, each, k) if kind in ("each", "sum") else (rows, k))
        chosen = mx.argsort(mx.random.uniform(shape=(rows, count)), axis=-1)[:, :each]
        found = [*x, chosen.astype(mx.uint32)]
        found += [mx.random.uniform(shape=(rows, each))] * (kind == "sum")
        for _ in range(1 + (kind in ("pair", "gate"))):
            parts = packed((count * n, k), self.dtype, self.fmt)
            found += [a.reshape(count, n, -1) for a in parts]
        return found

    def _parts(self, given: list[Any]) -> tuple[Any, Any, Any, list[PackedMatrix]]:
        """Rows, experts, scores or None, and matrices: arrays or specs."""
        (x, chosen, *rest), kind = given, self.form[-1]
        scores = rest.pop(0) if kind == "sum" else None
        each = len(rest) // (1 + (kind in ("pair", "gate")))
        matrices = [PackedMatrix(*rest[i : i + each]) for i in range(0, len(rest), each)]
        return x, chosen, scores, matrices

    def bind(self, inputs: Inputs, config: Fixed) -> Path:
        x, chosen, scores, matrices = self._parts([*map(Spec.of, inputs)])
        kind = self.form[-1]
        if kind == "sum":
            return experts.experts_combined(x, chosen, scores, matrices[0], None, self.fmt)
        gate, share = {"gate": "silu"}.get(kind), 1 if kind == "each" else self.sizes[2]
        return experts.experts_products(x, chosen, matrices, self.fmt, gate, share)

    def stock(self, inputs: Inputs) -> Inputs:
        x, chosen, scores, matrices = self._parts(inputs)
        rows = x[..., None, :] if x.ndim > chosen.ndim else x[..., None, None, :]
        found = [_gathered(rows, matrix, chosen, self.fmt).squeeze(-2) for matrix in matrices]
        if scores is not None:
            return [(found[0] * scores[..., None]).sum(axis=-2).astype(x.dtype)]
        gated = self.form[-1] == "gate"
        return [found[0] * mx.sigmoid(found[0]) * found[1]] if gated else found


class GatherRecord(CallRecord):
    """Products of rows sorted by expert, as of a prompt: of rows, experts, N, K; a format."""

    family = "gather_qmm"
    sizes_measured = CALIBRATED_PROMPTS

    def at(self, size: int) -> GatherRecord:
        """Of a prompt of so many tokens, where this is of the longest."""
        rows = self.sizes[0] * size // CALIBRATED_PROMPTS[-1]
        return replace(self, sizes=(rows, *self.sizes[1:]))

    def larger(self) -> Iterator[Record]:
        return (replace(self, sizes=(self.sizes[0] * n, *self.sizes[1:])) for n in (2, 4, 8))

    def variant(self, config: Fixed) -> Any:
        rows, count, *_ = self.sizes
        return gather_qmm.gather_qmm_config(rows, count, self.dtype, self.fmt), self._tensors()

    def _tensors(self) -> TensorConfig:
        rows, count, _, k = self.sizes
        return tensor_config(rows // count, k, self.dtype, self.fmt, True)

    def kernels(self) -> tuple[Kernel, ...]:
        return gather_qmm._LIST, gather_qmm._TILES, gather_qmm._TENSORS

    def bucket(self) -> tuple[tuple[int, ...], str]:
        rows, *others = self.sizes
        return (rounded(rows), *others), "-".join(map(str, self.form))

    def bytes(self) -> float:
        rows, count, n, k = self.sizes
        return min(rows, count) * matrix_bytes(n, k, self.fmt)

    def operations(self) -> float:
        rows, _, n, k = self.sizes
        return 2.0 * rows * n * k

    def inputs(self) -> Inputs:
        rows, count, n, k = self.sizes
        parts = packed((count * n, k), self.dtype, self.fmt)
        chosen = mx.arange(rows) * count // rows
        x, matrix = normal(self.dtype, (rows, 1, k)), (a.reshape(count, n, -1) for a in parts)
        return [*x, chosen.astype(mx.uint32), *matrix]

    def bind(self, inputs: Inputs, config: Any) -> Path:
        """By a configuration of tensor operations, or as the launcher chooses."""
        rows, count, *_ = self.sizes
        x, _, *matrix = map(Spec.of, inputs)
        call = MatmulCall(x, PackedMatrix(*matrix), True, self.fmt)
        pairs = Pairs((rows,), 1, True)
        if config == Fixed():
            config = gather_qmm.gather_qmm_config(rows, count, self.dtype, call.fmt)
            if not device_of().gpu or rows < count:
                config = configuration(backend(), 1, True, True, call.fmt)
                return partial(_given, gather_qmv(call, pairs, config))
        return partial(_given, gather_qmm.gather_qmm_sorted(call, pairs, config))

    def stock(self, inputs: Inputs) -> Inputs:
        x, chosen, *matrix = inputs
        # Rows in no order go one by one, so that no unit of TF32 has a part in the right result.
        return [_gathered(x, PackedMatrix(*matrix), chosen, self.fmt, not exactly.get())]

    def paths(self, inputs: Inputs) -> dict[str, Path]:
        found = super().paths(inputs)
        if tensor_ops.missing() is None:
            found["tensor"] = self.bind(inputs, self._tensors())
        return found


class RouterRecord(CallRecord):
    """The choice of experts: of rows, experts; a router, and whether there are bias and factors."""

    family = "router"

    def bucket(self) -> tuple[tuple[int, ...], str]:
        router, bias, factors = self.form
        defaults = Router._field_defaults
        changed = (item for item in router._asdict().items() if item[1] != defaults.get(item[0]))
        words = [f"{name}={value}".replace("mlx.core.", "") for name, value in changed]
        return self.sizes, "-".join([*words, *["bias"] * bias, *["factors"] * factors])

    def kernels(self) -> tuple[Kernel, ...]:
        return (experts.CHOSEN,)

    def bytes(self) -> float:
        return float(prod(self.sizes) * self.dtype.size)

    def inputs(self) -> Inputs:
        (rows, count), (_, biased, scaled) = self.sizes, self.form
        return normal(self.dtype, (rows, count), *[(count,)] * (biased + scaled))

    def _optional(self, rest: list[Any]) -> tuple[Any, Any]:
        """Bias and factors, or None."""
        _, biased, scaled = self.form
        return rest[0] if biased else None, rest[-1] if scaled else None

    def bind(self, inputs: Inputs, config: Fixed) -> Path:
        logits, *rest = map(Spec.of, inputs)
        launch = experts.experts_chosen(logits, *self._optional(rest), self.form[0])
        return lambda inputs: launch(inputs)[1:]

    def stock(self, inputs: Inputs) -> Inputs:
        """The shares of the chosen experts, the largest first: only these are compared."""
        logits, *rest = inputs
        return experts_chosen(logits, *self._optional(rest), router=self.form[0])[1:]


def _gathered(
    x: mx.array, matrix: PackedMatrix, chosen: mx.array, fmt: Format, in_order: bool = False
) -> mx.array:
    """Products by MLX's operator."""
    call = MatmulCall(Spec.of(x), matrix, True, fmt)
    product = reference.gather_qmm(call, chosen.shape, in_order)
    return product(x, *matrix[:3], None, chosen, None)


def _given(launch: Any, inputs: Inputs) -> Inputs:
    x, chosen, w, scales, *biases = inputs
    return [launch(x, w, scales, biases[0] if biases else None, None, chosen, None)]
