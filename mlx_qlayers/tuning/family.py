"""What the tuner asks of a kernel family."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx

from ..dispatch.problem import Problem
from ..runtime import tensor_ops
from ..runtime.backend import backend
from .moves import Move

P = TypeVar("P", bound=Problem)
C = TypeVar("C")
Inputs = list[mx.array]
# Gives all outputs.
Path = Callable[[Inputs], Inputs]
# Whether operators are asked for the right result, and not for how long they take.
exactly: ContextVar[bool] = ContextVar("exactly", default=False)
# Rows that no GPU multiplies by matrix units of TF32.
_FEW = 8


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
    def stock(self, inputs: Inputs, problem: P) -> Inputs:
        """The outputs by operators of MLX, as fast as those are."""

    def replaced(self, path: str, problem: P) -> Sequence[int]:
        """The inputs of a path in whose places the next launch finds the outputs behind the first.

        What holds them gives them up, so that operators of MLX write into them in place.
        """
        return ()

    def paths(self, inputs: Inputs, problem: P) -> dict[str, Path]:
        """The other paths that ``auto`` could take; ``"stock"`` is the operator of MLX."""
        return {"stock": lambda inputs: self.stock(inputs, problem)}

    def reference(self, inputs: Inputs, problem: P) -> Inputs:
        """The right outputs, as :meth:`numbers` gives them: those of operators in float32."""
        token = exactly.set(True)
        try:
            return self.stock(list(map(in_float32, inputs)), problem)
        finally:
            exactly.reset(token)

    def numbers(self, outputs: Inputs, problem: P) -> Inputs:
        """Of the outputs of a kernel what is compared."""
        return outputs

    def tolerances(self, problem: P, outputs: int) -> list[float]:
        """The largest error of each output that passes, over its largest number."""
        return [4 * float(mx.finfo(problem.dtype).eps) + 1e-4] * outputs

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


def in_float32(x: mx.array) -> mx.array:
    """Numbers in float32, and all else as it is."""
    return x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x


def in_parts(rows: int) -> list[slice]:
    """Rows that operators take at once: few where the right result is asked of TF32 units."""
    has_units = backend() == "cuda" or (backend() == "metal" and tensor_ops.missing() is None)
    rounds = exactly.get() and has_units and os.environ.get("MLX_ENABLE_TF32") != "0"
    each = _FEW if rounds else max(rows, 1)
    return [slice(start, start + each) for start in range(0, max(rows, 1), each)]


def normal(dtype: mx.Dtype, *shapes: tuple[int, ...]) -> Inputs:
    """Random arrays."""
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]
