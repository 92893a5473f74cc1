"""What the tuner asks of a kernel family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx

from ..dispatch.problem import Problem
from .moves import Move

P = TypeVar("P", bound=Problem)
C = TypeVar("C")
Inputs = list[mx.array]
Path = Callable[[Inputs], mx.array]


class Family(ABC, Generic[P, C]):
    """One kernel family: the moves of its configurations, and how to run and verify them.

    Attributes:
        problem: the class of its problems.
        kinds: of its moves, by the fields that they change, where they are told apart.
    """

    problem: type[P]
    kinds: ClassVar[Mapping[str, type[Move]]] = {}

    @property
    def name(self) -> str:
        """The family's name, unique in the package."""
        return self.problem.family

    @property
    def moves(self) -> tuple[Move, ...]:
        """One for each field that configurations may differ in, to the values that it may have."""
        values = self.problem.values.items()
        return tuple(self.kinds.get(field, Move)(field, given) for field, given in values)

    def is_fixed(self, config: Any) -> bool:
        """Whether no move leads from a configuration to another."""
        return False

    def why_not(self, config: C, problem: P) -> str | None:
        """Why a configuration may not be launched; None if it may."""
        return problem.why_not(config)

    @abstractmethod
    def inputs(self, problem: P) -> Inputs:
        """Fresh random inputs."""

    @abstractmethod
    def bind(self, inputs: Inputs, problem: P, config: C) -> Path:
        """The launch of the kernel for inputs like these."""

    @abstractmethod
    def stock(self, inputs: Inputs, problem: P) -> mx.array:
        """The result by operators of MLX."""

    def paths(self, inputs: Inputs, problem: P) -> dict[str, Path]:
        """The other paths that ``auto`` could take; ``"stock"`` is the operator of MLX."""
        return {"stock": lambda inputs: self.stock(inputs, problem)}

    def reference(self, inputs: Inputs, problem: P) -> mx.array:
        """The right result: that of the stock operator in float32."""
        floats = (mx.float16, mx.bfloat16)
        single = [a.astype(mx.float32) if a.dtype in floats else a for a in inputs]
        return self.stock(single, problem)

    def tolerance(self, problem: P) -> float:
        """The largest error that passes, over the largest number of the result."""
        return 4 * float(mx.finfo(problem.dtype).eps) + 1e-4

    def near(self, config: C, problem: P) -> list[C]:
        """The legal configurations one move away."""
        return self._legal((new for move in self.moves for new in move(config)), problem)

    def all(self, problem: P, example: C) -> list[C]:
        """Every legal configuration to which moves lead from an example."""
        found = [example]
        for move in self.moves:
            found += [new for config in found for new in move(config)]
        return self._legal(found, problem)

    def _legal(self, configs: Iterable[C], problem: P) -> list[C]:
        unique = dict.fromkeys(problem.completed(config) for config in configs)
        return [config for config in unique if self.why_not(config, problem) is None]


def normal(dtype: mx.Dtype, *shapes: tuple[int, ...]) -> Inputs:
    """Random arrays."""
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]
