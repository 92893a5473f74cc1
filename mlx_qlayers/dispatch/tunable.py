"""What can be tuned: for each kernel family the question that operations ask, and its heuristic.

A problem is such a question. Its class says which configurations answer it, which kernels they
belong to, and under which key a result is stored.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

# Rows of decoding and of prompts, and keys of a cache, of which a device is calibrated. What lies
# between two of them goes by the larger.
CALIBRATED_ROWS = (1, 2, 4, 8, 16)
CALIBRATED_PROMPTS = (64, 512, 2048)
CALIBRATED_KEYS = (256, 1024, 4096, 16384)


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

    @abstractmethod
    def heuristic(self, device: str) -> Any:
        """The configuration without tuning, for ``"metal"``, ``"cuda"`` or ``"host"``."""

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels whose text results depend on."""
        return _KERNELS[self.family]()

    @abstractmethod
    def bucket(self) -> tuple[tuple[int, ...], str]:
        """The shape and the rest of what matters; problems of which they agree share results."""

    def larger(self) -> Iterator[Problem]:
        """The same with the next more rows, or keys, of which a device is calibrated."""
        return iter(())

    @property
    def key(self) -> str:
        """Where results for it are stored.

        Example:
            >>> RowSumProblem(64, 1024, mx.float16).key
            'row_sum 64x1024 float16'
        """
        shape, rest = self.bucket()
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return " ".join(filter(None, (self.family, "x".join(map(str, shape)), dtype, rest)))


@dataclass(frozen=True)
class RowSumProblem(Problem):
    """Sums of the rows of x (M, K)."""

    m: int
    k: int
    dtype: mx.Dtype
    family, configs = "row_sum", (RowSum,)

    def heuristic(self, device: str) -> RowSum:
        return RowSum(local=4)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (self.m, self.k), ""


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
    family, configs = "qmv", (qmv.QmvMatrixConfig, qmv.QmvConfig)

    def heuristic(self, device: str) -> qmv.QmvConfig | qmv.QmvMatrixConfig:
        shape = self.rows, self.n, self.k
        return qmv.qmv_config(device, *shape, self.dtype, self.fmt, self.kind)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        form = _form(self.fmt, True) + ("-" + self.kind if self.kind else "")
        return (self.rows, self.n, self.k), form

    def larger(self) -> Iterator[Problem]:
        return _with_more(self, "rows", CALIBRATED_ROWS)


@dataclass(frozen=True)
class QmmProblem(Problem):
    """17 rows and more times a packed matrix."""

    m: int
    n: int
    k: int
    dtype: mx.Dtype
    fmt: Format
    transpose: bool
    family, configs = "qmm", (qmm.QmmConfig,)

    def heuristic(self, device: str) -> qmm.QmmConfig:
        shape = self.m, self.n, self.k
        return qmm.qmm_config(device, *shape, self.dtype, self.fmt, self.transpose)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (rounded(self.m), self.n, self.k), _form(self.fmt, self.transpose)

    def larger(self) -> Iterator[Problem]:
        return _with_more(self, "m", CALIBRATED_PROMPTS)


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
    family, configs = "attention_decode", (decode.Decode, decode.Serial)

    def heuristic(self, device: str) -> decode.Decode | decode.Serial:
        widths = self.width, self.v_width
        return decode.configure(device, self.dtype, self.rows, *widths, self.bits, self.keys)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        shape = self.caches, self.rows, rounded(self.keys), self.width, self.v_width
        return shape, f"bits-{self.bits}"

    def larger(self) -> Iterator[Problem]:
        return _with_more(self, "keys", CALIBRATED_KEYS)


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
    family, configs = "attention_step", (step.Step,)

    def heuristic(self, device: str) -> step.Step:
        return step.configure(device, self.dtype, self.size)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        heads = self.batch, self.heads, self.kv_heads
        return (*heads, rounded(self.size), self.width, self.v_width), ""


@dataclass(frozen=True)
class AttentionForwardProblem(Problem):
    """Attention of many queries, without a mask but the causal one.

    Attributes:
        shape: (B, H, Hkv, L, S, D, Dv).
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    causal: bool
    family, configs = "attention_forward", (Layout,)

    def heuristic(self, device: str) -> Layout:
        return layout("forward", device, self.dtype, max(self.shape[5:]))

    def bucket(self) -> tuple[tuple[int, ...], str]:
        lengths = map(rounded, self.shape[3:5])
        return (*self.shape[:3], *lengths, *self.shape[5:]), "causal" if self.causal else "full"


@dataclass(frozen=True)
class GridSampleProblem(Problem):
    """Samples of images of so many channels and dimensions at points without order."""

    channels: int
    dtype: mx.Dtype
    deterministic: bool
    dims: int
    family, configs = "grid_sample", (grid_sample.GridSampleConfig,)

    def heuristic(self, device: str) -> grid_sample.GridSampleConfig:
        return grid_sample.heuristic(self.channels, self.dtype, device, self.deterministic)

    def bucket(self) -> tuple[tuple[int, ...], str]:
        return (self.channels, self.dims), "deterministic" if self.deterministic else "any"


# Kernels of decoding attention: for CPUs or GPUs, plain or packed keys.
_DECODE = ((False, False), (False, True), (True, False), (True, True))
_KERNELS: dict[str, Callable[[], tuple[Kernel, ...]]] = {
    "row_sum": lambda: (row_sum.KERNEL,),
    "qmv": lambda: (qmv._kernel(True, ()), qmv._kernel(False, ())),
    "qmm": lambda: (qmm.QMM, qmm.QMM_SUM),
    "attention_decode": lambda: (
        *(decode._kernel(serial, packed, False, False) for serial, packed in _DECODE),
        decode._combine(False),
    ),
    "attention_step": lambda: (step._kernel(False, False), decode._combine(False)),
    "attention_forward": lambda: (forward._FORWARD,),
    "grid_sample": lambda: (grid_sample._FORWARD, grid_sample._GRADIENT_GRID),
}
PROBLEMS: dict[str, type[Problem]] = {kind.family: kind for kind in Problem.__subclasses__()}


@cache
def source_hash(*kernels: Kernel) -> str:
    """What changes when the text of a kernel does."""
    text = "\0".join(k.program.header + k.program.source for k in kernels)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_more(problem: Any, name: str, sizes: tuple[int, ...]) -> Iterator[Problem]:
    return (replace(problem, **{name: n}) for n in sizes if n > getattr(problem, name))


def _form(fmt: Format, transpose: bool) -> str:
    return f"{fmt.mode}-{fmt.group_size}-{fmt.bits}-{'t' if transpose else 'n'}"
