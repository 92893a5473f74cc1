"""What the tuner asks of a kernel family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import mlx.core as mx

from ..runtime.kernel import Kernel
from ..runtime.tracing import Record
from .moves import Axis
from .store import key_of

C = TypeVar("C")


@dataclass(frozen=True)
class Problem:
    """What a kernel is tuned for.

    Attributes:
        shape: the family's letters, such as M, N, K.
        dtype: of the floating point inputs.
        form: the rest of what matters, such as a quantized format; no spaces.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    form: str = ""


class Family(ABC, Generic[C]):
    """One kernel family: its configurations, and how to run and judge them.

    Attributes:
        name: unique in the package.
        config: the class of its configurations, a frozen dataclass.
        kernels: those that a configuration belongs to.
        axes: the moves that a configuration admits.
    """

    name: ClassVar[str]
    config: type[C]
    kernels: ClassVar[tuple[Kernel, ...]]
    axes: ClassVar[tuple[Axis, ...]]

    @abstractmethod
    def heuristic(self, problem: Problem, device: str) -> C:
        """The configuration without tuning, for ``"metal"``, ``"cuda"`` or ``"host"``."""

    @abstractmethod
    def why_not(self, config: C, problem: Problem) -> str | None:
        """Why a configuration may not be launched; None if it may."""

    @abstractmethod
    def inputs(self, problem: Problem) -> list[mx.array]:
        """Fresh random inputs."""

    @abstractmethod
    def run(self, inputs: list[mx.array], problem: Problem, config: C) -> mx.array:
        """Launch the kernel."""

    @abstractmethod
    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        """The right result, in float32."""

    @abstractmethod
    def problem(self, record: Record) -> Problem:
        """The problem that a launch of one of the kernels belongs to."""

    def paths(self, problem: Problem) -> Mapping[str, Callable[[list[mx.array]], mx.array]]:
        """The other paths that ``auto`` could take; the stock operator among them."""
        return {}

    def tolerance(self, problem: Problem) -> float:
        """The largest error that passes, over the largest number of the result."""
        return 4 * float(mx.finfo(problem.dtype).eps) + 1e-4

    def key(self, problem: Problem) -> str:
        """Where results for a problem are stored."""
        return key_of(self.name, problem.shape, problem.dtype, problem.form)
