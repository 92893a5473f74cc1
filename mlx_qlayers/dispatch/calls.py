"""Operations with one kernel that has no options: a device is calibrated by them, none is tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import mlx.core as mx

from ..formats import Format
from ..metal.attention import latent
from ..metal.attention.layout import rounded
from ..metal.gather_qmm import experts, gather_qmm
from ..metal.quantized_matmul.qmm_tensor import tensor_config
from ..options import Router
from ..runtime.kernel import Kernel
from .problem import CALIBRATED_KEYS, CALIBRATED_PROMPTS, CALIBRATED_ROWS, Problem


@dataclass(frozen=True)
class Fixed:
    """A configuration without a choice."""


@dataclass(frozen=True)
class CallProblem(Problem):
    """A call of such an operation.

    Attributes:
        sizes: of its arrays; the first is that of its rows or keys.
        dtype: of its input.
        form: all else that matters.
    """

    sizes: tuple[int, ...]
    dtype: mx.Dtype
    form: tuple[Any, ...]
    configs, values = (Fixed,), {}
    sizes_measured: ClassVar[tuple[int, ...]] = CALIBRATED_ROWS

    def heuristic(self, device: str) -> Fixed:
        return Fixed()

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return self.sizes, "-".join(map(str, self.form))

    @property
    def size(self) -> int:
        return self.sizes[0]

    def at(self, size: int) -> CallProblem:
        return replace(self, sizes=(size, *self.sizes[1:]))

    def bytes(self) -> float:
        return float(prod(self.sizes) * self.dtype.size)


class ExpertsProblem(CallProblem):
    """Products with experts: of rows, experts, experts of a row, N, K; a format and a kind.

    Of one matrix (``one``), of two (``pair``), of these gated (``gate``), of a row for each expert
    (``each``), or of such rows, added up by scores (``sum``).
    """

    family = "experts"

    def kernels(self) -> tuple[Kernel, ...]:
        return ((experts._combined if self.form[-1] == "sum" else experts._products)(()),)

    def variant(self, config: Any) -> bool:
        rows, count, each, *_ = self.sizes
        return experts.share_experts((rows, each), count)

    def calibrated(self) -> Iterator[Problem]:
        # Where rows seldom share experts sums take the place of the products.
        kind, every = self.form[-1], map(self.at, self.sizes_measured)
        only = kind in ("each", "sum")
        return (each for each in every if not only or each.variant(None) == (kind == "each"))

    def bytes(self) -> float:
        (rows, count, each, n, k), (_, group, bits, kind) = self.sizes, self.form
        matrices = min(rows * each, count) * (1 + (kind in ("pair", "gate")))
        return float(matrices * n * k * (bits + 32 / group) / 8)


class GatherProblem(CallProblem):
    """Products of rows sorted by expert, as of a prompt: of rows, experts, N, K; a format."""

    family = "gather_qmm"
    sizes_measured = CALIBRATED_PROMPTS

    def at(self, size: int) -> CallProblem:
        """Of a prompt of so many tokens, where this is of the longest."""
        rows = self.sizes[0] * size // CALIBRATED_PROMPTS[-1]
        return replace(self, sizes=(rows, *self.sizes[1:]))

    def larger(self) -> Iterator[Problem]:
        return (replace(self, sizes=(self.sizes[0] * n, *self.sizes[1:])) for n in (2, 4, 8))

    def variant(self, config: Fixed) -> Any:
        (rows, count, _, k), (mode, group, bits) = self.sizes, self.form
        fmt = Format(group, bits, mode)
        tensors = tensor_config(rows // count, k, self.dtype, fmt, True)
        return gather_qmm.gather_qmm_config(rows, count, self.dtype, fmt), tensors

    def kernels(self) -> tuple[Kernel, ...]:
        return gather_qmm._LIST, gather_qmm._TILES, gather_qmm._TENSORS

    def bucket(self) -> tuple[tuple[int, ...], str]:
        rows, *others = self.sizes
        return (rounded(rows), *others), "-".join(map(str, self.form))

    def bytes(self) -> float:
        (rows, count, n, k), (_, group, bits) = self.sizes, self.form
        return float(min(rows, count) * n * k * (bits + 32 / group) / 8)

    def operations(self) -> float:
        rows, _, n, k = self.sizes
        return 2.0 * rows * n * k


class RouterProblem(CallProblem):
    """The choice of experts: of rows, experts; a router, and whether there are bias and factors."""

    family = "router"

    def bucket(self) -> tuple[tuple[int, ...], str]:
        router, bias, factors = self.form
        defaults = Router._field_defaults
        changed = (item for item in router._asdict().items() if item[1] != defaults.get(item[0]))
        words = [f"{name}={value}".replace("mlx.core.", "") for name, value in changed]
        return self.sizes, "-".join([*words, *["bias"] * bias, *["factors"] * factors])

    def kernels(self) -> tuple[Kernel, ...]:
        return (experts._chosen(()),)


class LatentProblem(CallProblem):
    """Attention to latent rows: of rows, batch, heads and both widths; nothing else."""

    family = "latent_attention"
    sizes_measured = CALIBRATED_KEYS

    @property
    def stage(self) -> int:
        return int(self.sizes[1] > 1)

    def variant(self, config: Fixed) -> Any:
        return latent.splits_of(self.sizes[0]) > 1

    def kernels(self) -> tuple[Kernel, ...]:
        return (latent._kernel(False),)

    def bytes(self) -> float:
        rows, batch, _, width, turned = self.sizes
        return float(rows * batch * (width + turned) * self.dtype.size)
