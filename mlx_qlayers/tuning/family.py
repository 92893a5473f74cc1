"""What the tuner asks of a kernel family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx

from ..runtime.kernel import Kernel
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

    def __reduce__(self) -> tuple[Any, ...]:
        # For other processes: dtypes cannot be pickled.
        return _problem, (self.shape, str(self.dtype).removeprefix("mlx.core."), self.form)


def _problem(shape: tuple[int, ...], dtype: str, form: str) -> Problem:
    return Problem(shape, getattr(mx, dtype), form)


def _moved(configs: Iterable[C], axes: Sequence[Axis]) -> list[C]:
    """Where the moves of some axes lead, but for what a configuration does not admit at all."""
    found = []
    for config in configs:
        for move in (move for axis in axes for move in axis.moves(config)):
            with suppress(ValueError):
                found.append(move(config))
    return found


class Family(ABC, Generic[C]):
    """One kernel family: its configurations, and how to run and judge them.

    Attributes:
        name: unique in the package.
        configs: the classes of its configurations, frozen dataclasses that differ in their fields.
        kernels: those that a configuration belongs to.
        axes: the moves that a configuration admits.
    """

    name: ClassVar[str]
    configs: tuple[type[C], ...]
    kernels: ClassVar[tuple[Kernel, ...]]
    axes: ClassVar[tuple[Axis, ...]]

    @abstractmethod
    def heuristic(self, problem: Problem, device: str) -> C:
        """The configuration without tuning, for ``"metal"``, ``"cuda"`` or ``"host"``."""

    def others(self, problem: Problem, device: str) -> tuple[C, ...]:
        """Configurations that a search should start from too, as those of another kernel."""
        return ()

    def completed(self, config: C, problem: Problem) -> C:
        """A configuration after a move, with what follows from the moved field."""
        return config

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
    def asked(self, *arguments: Any) -> Problem:
        """The problem behind what a launcher asks :func:`lookup.found`."""

    def bucket(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape whose results count for a shape too; by default only its own."""
        return shape

    def paths(self, problem: Problem) -> Mapping[str, Callable[[list[mx.array]], mx.array]]:
        """The other paths that ``auto`` could take; the stock operator among them."""
        return {}

    def tolerance(self, problem: Problem) -> float:
        """The largest error that passes, over the largest number of the result."""
        return 4 * float(mx.finfo(problem.dtype).eps) + 1e-4

    def near(self, config: C, problem: Problem) -> list[C]:
        """The legal configurations one move away."""
        return self._legal(_moved([config], self.axes), problem)

    def all(self, problem: Problem, example: C) -> list[C]:
        """Every legal configuration that differs from an example along the axes."""
        found = [example]
        for axis in self.axes:
            found += _moved(found, [axis])
        return self._legal(found, problem)

    def _legal(self, configs: Iterable[C], problem: Problem) -> list[C]:
        unique = dict.fromkeys(self.completed(config, problem) for config in configs)
        return [config for config in unique if self.why_not(config, problem) is None]

    def part(self, problem: Problem) -> tuple[Problem, float]:
        """A part of a problem small enough for the checked host, and how many of it make the whole.

        A launch for the whole has as many more threadgroups, each of which does the same.
        """
        return problem, 1.0

    def registers(self, config: C, problem: Problem) -> int:
        """32-bit registers that a thread needs, as far as can be told from its arrays."""
        return 32

    def resident(self, config: C) -> int:
        """Threadgroups for which the compiler must leave registers, on CUDA; 0 leaves it to it."""
        return getattr(config, "resident", 0)

    def key(self, problem: Problem) -> str:
        """Where results for a problem are stored."""
        return key_of(self.name, self.bucket(problem.shape), problem.dtype, problem.form)
