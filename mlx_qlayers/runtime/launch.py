"""One checked call of a kernel, as a backend receives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from . import signature
from .program import Program

Size = tuple[int, int, int]
TemplateValue = bool | int | mx.Dtype


@dataclass(frozen=True)
class Plan:
    """A call that was checked, for all that differ from it in the values of the inputs alone."""

    program: Program
    template: list[tuple[str, TemplateValue]]
    grid: Size
    threadgroup: Size
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Launch:
    """What one launch needs; see ``runtime/README.md`` for what is promised about it.

    Attributes:
        program: the kernel's text and parameters, the same object at every call.
        inputs: the arrays, in the order of ``program.input_names``.
        template: names and values in declared order, as MLX takes them.
        grid: the number of threads in x, y and z.
        threadgroup: the threads of one threadgroup in x, y and z.
        output_shapes: one shape for each output.
        output_dtypes: one dtype for each output.
        init_value: what outputs are filled with first, or None to leave them unset.
        memo: where a backend keeps, under its name, what it has worked out for launches that differ
            from this one in the values of their inputs alone: they all carry the same dict.
    """

    program: Program
    inputs: list[mx.array]
    template: list[tuple[str, TemplateValue]]
    grid: Size
    threadgroup: Size
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]
    init_value: float | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, inputs: list[mx.array], init_value: float | None) -> Launch:
        """The call that was checked, of these arrays."""
        return cls(
            plan.program,
            inputs,
            plan.template,
            plan.grid,
            plan.threadgroup,
            plan.output_shapes,
            plan.output_dtypes,
            init_value,
            plan.memo,
        )

    @property
    def function(self) -> str:
        """The name of the kernel function in :attr:`text`."""
        return self._generated()[0]

    @property
    def text(self) -> str:
        """The Metal source that MLX generates for this launch, without MLX's preamble."""
        return self._generated()[1]

    def _generated(self) -> tuple[str, str]:
        return signature.generate(
            self.program, self.inputs, tuple(self.template), tuple(self.output_dtypes)
        )
