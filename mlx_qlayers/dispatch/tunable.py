"""What can be tuned: for each kernel family the question that operations ask, and its heuristic.

A problem is such a question. Its class says which configurations answer it, which kernels they
belong to, and under which key a result is stored.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import mlx.core as mx

from ..formats import Format
from ..metal.attention import decode, forward, step
from ..metal.attention.layout import Layout, layout, rounded
from ..metal.common import row_sum
from ..metal.common.row_sum import RowSum
from ..metal.grid_sample import launch as grid_sample
from ..metal.quantized_matmul import qmm, qmv
from ..runtime.kernel import Kernel


class Problem(ABC):
    """What a kernel is configured for; its fields are the arguments of the question.

    Attributes:
        family: the name of the kernel family.
        configs: the classes of its configurations, which differ in their fields.
        dtype: of the floating-point inputs.
    """

    family: ClassVar[str]
    configs: ClassVar[tuple[type[Any], ...]]
    dtype: mx.Dtype

    @property
    @abstractmethod
    def key(self) -> str:
        """Where results for it are stored; problems that share results have one key."""

    @abstractmethod
    def heuristic(self, device: str) -> Any:
        """The configuration without tuning, for ``"metal"``, ``"cuda"`` or ``"host"``."""

    @staticmethod
    @abstractmethod
    def kernels() -> tuple[Kernel, ...]:
        """The kernels whose text results depend on."""

    def _key(self, shape: tuple[int, ...], dtype: mx.Dtype, rest: str = "") -> str:
        name = str(dtype).removeprefix("mlx.core.")
        return " ".join(filter(None, (self.family, "x".join(map(str, shape)), name, rest)))


@dataclass(frozen=True)
class RowSumProblem(Problem):
    """Sums of the rows of x (M, K).

    Example:
        >>> RowSumProblem(64, 1024, mx.float16).key
        'row_sum 64x1024 float16'
    """

    m: int
    k: int
    dtype: mx.Dtype
    family = "row_sum"
    configs = (RowSum,)

    @property
    def key(self) -> str:
        return self._key((self.m, self.k), self.dtype)

    def heuristic(self, device: str) -> RowSum:
        return RowSum(local=4)

    @staticmethod
    def kernels() -> tuple[Kernel, ...]:
        return (row_sum.KERNEL,)


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
    family = "qmv"
    configs = (qmv.QmvMatrixConfig, qmv.QmvConfig)

    @property
    def key(self) -> str:
        form = "-".join(filter(None, (_form(self.fmt, True), self.kind)))
        return self._key((self.rows, self.n, self.k), self.dtype, form)

    def heuristic(self, device: str) -> qmv.QmvConfig | qmv.QmvMatrixConfig:
        arguments = self.rows, self.n, self.k, self.dtype, self.fmt, self.kind
        return qmv.qmv_config(device, *arguments)

    @staticmethod
    def kernels() -> tuple[Kernel, ...]:
        return qmv._kernel(True, ()), qmv._kernel(False, ())


@dataclass(frozen=True)
class QmmProblem(Problem):
    """17 rows and more times a packed matrix."""

    m: int
    n: int
    k: int
    dtype: mx.Dtype
    fmt: Format
    transpose: bool
    family = "qmm"
    configs = (qmm.QmmConfig,)

    @property
    def key(self) -> str:
        shape = rounded(self.m), self.n, self.k
        return self._key(shape, self.dtype, _form(self.fmt, self.transpose))

    def heuristic(self, device: str) -> qmm.QmmConfig:
        arguments = self.m, self.n, self.k, self.dtype, self.fmt, self.transpose
        return qmm.qmm_config(device, *arguments)

    @staticmethod
    def kernels() -> tuple[Kernel, ...]:
        return qmm.QMM, qmm.QMM_SUM


@dataclass(frozen=True)
class AttentionDecodeProblem(Problem):
    """One query for each of so many rows over the keys of so many caches.

    Attributes:
        rows: queries of one key head.
        width, v_width: of keys and of values.
        bits: of packed keys and values; 0 for plain ones.
        caches: those of the batch and of all key heads.
        keys: of each.
    """

    dtype: mx.Dtype
    rows: int
    width: int
    v_width: int
    bits: int
    caches: int
    keys: int
    family = "attention_decode"
    configs = (decode.Decode,)

    @property
    def key(self) -> str:
        shape = self.caches, self.rows, rounded(self.keys), self.width, self.v_width
        return self._key(shape, self.dtype, f"bits-{self.bits}")

    def heuristic(self, device: str) -> decode.Decode | decode.Serial:
        widths = self.width, self.v_width
        return decode.configure(device, self.dtype, self.rows, *widths, self.bits, self.keys)

    @staticmethod
    def kernels() -> tuple[Kernel, ...]:
        plain, packed = (decode._kernel(False, bits, False, False) for bits in (False, True))
        return plain, packed, decode._combine(False)


@dataclass(frozen=True)
class AttentionStepProblem(Problem):
    """One token of each sequence, which attends to buffers of so many rows."""

    dtype: mx.Dtype
    batch: int
    heads: int
    kv_heads: int
    size: int
    width: int
    v_width: int
    family = "attention_step"
    configs = (step.Step,)

    @property
    def key(self) -> str:
        shape = self.batch, self.heads, self.kv_heads, rounded(self.size), self.width, self.v_width
        return self._key(shape, self.dtype)

    def heuristic(self, device: str) -> step.Step:
        return step.configure(self.size)

    @staticmethod
    def kernels() -> tuple[Kernel, ...]:
        return step._kernel(False, False), decode._combine(False)


@dataclass(frozen=True)
class AttentionForwardProblem(Problem):
    """Attention of many queries, without a mask but the causal one.

    Attributes:
        shape: (B, H, Hkv, L, S, D, Dv).
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    causal: bool
    family = "attention_forward"
    configs = (Layout,)

    @property
    def key(self) -> str:
        batch, heads, kv_heads, queries, keys, *widths = self.shape
        shape = batch, heads, kv_heads, rounded(queries), rounded(keys), *widths
        return self._key(shape, self.dtype, "causal" if self.causal else "full")

    def heuristic(self, device: str) -> Layout:
        return layout("forward", device, self.dtype, max(self.shape[5:]))

    @staticmethod
    def kernels() -> tuple[Kernel, ...]:
        return (forward._FORWARD,)


@dataclass(frozen=True)
class GridSampleProblem(Problem):
    """Samples of images of so many channels and dimensions at points without order."""

    channels: int
    dtype: mx.Dtype
    deterministic: bool
    dims: int
    family = "grid_sample"
    configs = (grid_sample.GridSampleConfig,)

    @property
    def key(self) -> str:
        form = "deterministic" if self.deterministic else "any"
        return self._key((self.channels, self.dims), self.dtype, form)

    def heuristic(self, device: str) -> grid_sample.GridSampleConfig:
        return grid_sample.heuristic(self.channels, self.dtype, device, self.deterministic)

    @staticmethod
    def kernels() -> tuple[Kernel, ...]:
        return grid_sample._FORWARD, grid_sample._GRADIENT_GRID


PROBLEMS: dict[str, type[Problem]] = {
    problem.family: problem
    for problem in (
        RowSumProblem,
        QmvProblem,
        QmmProblem,
        AttentionDecodeProblem,
        AttentionStepProblem,
        AttentionForwardProblem,
        GridSampleProblem,
    )
}


@cache
def source_hash(*kernels: Kernel) -> str:
    """What changes when the text of a kernel does."""
    text = "\0".join(k.program.header + k.program.source for k in kernels)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _form(fmt: Format, transpose: bool) -> str:
    return f"{fmt.mode}-{fmt.group_size}-{fmt.bits}-{'t' if transpose else 'n'}"
