"""Checks of a launch, made once for all arrays of the same shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from numbers import Real
from operator import index
from typing import Any

import mlx.core as mx

from .declaration import Declaration
from .devices import device_of
from .devices.record import most_threads
from .generated_source import TYPES
from .launch import Launch, Size, TemplateValue
from .program import CONSTANT_BELOW, Parameter
from .spec import Spec

# Kernels index with 32 bits unless they say otherwise.
_LIMIT_32 = 2**31
_LIMIT_64 = 2**63
_DTYPES = {name: dtype for dtype, name in TYPES.items()}
Inputs = Sequence[mx.array | Spec]


def checked_launch(
    kernel: Declaration,
    backend: str,
    inputs: Inputs,
    *,
    grid: Size,
    threadgroup: Size,
    output_shapes: Sequence[Sequence[int]],
    template: Mapping[str, TemplateValue] | None = None,
    output_dtypes: Sequence[mx.Dtype] | None = None,
    init_value: float | None = None,
) -> Launch:
    """The launch, or a KernelError if it does not fit the declaration or the hardware."""
    program, check = kernel.program, _Check(kernel, {} if template is None else template)
    check.count(inputs)
    values = check.template()
    check.memory(backend)
    for x, parameter in zip(inputs, program.inputs, strict=True):
        check.input(x, parameter)
    grid, threadgroup = check.size("grid", grid), check.size("threadgroup", threadgroup)
    check.threads(grid, threadgroup)
    check.registers(backend, prod(threadgroup))
    dtypes = check.output_dtypes(output_dtypes)
    check.multiples(inputs)
    shapes, specs = check.output_shapes(output_shapes), [Spec.of(x) for x in inputs]
    if not (init_value is None or isinstance(init_value, Real)):
        raise kernel.error(f"init_value must be a number or None, not {init_value!r}")
    if isinstance(init_value, int) and not -_LIMIT_64 <= init_value < _LIMIT_64:
        raise kernel.error(f"init_value must be a number of 64 bits, not {init_value!r}")
    return Launch(program, specs, values, grid, threadgroup, shapes, dtypes, init_value)


class _Check:
    """The checks of one kernel with values of its template."""

    def __init__(self, kernel: Declaration, values: Mapping[str, TemplateValue]) -> None:
        self.kernel, self.values, self.error = kernel, values, kernel.error

    def count(self, inputs: Inputs) -> None:
        names = self.kernel.program.input_names
        if not isinstance(inputs, (list, tuple)):
            raise self.error(f"inputs must be a list of arrays, not {_kind(inputs)}")
        if len(inputs) != len(names):
            raise self.error(f"takes {len(names)} inputs {names}, not {len(inputs)}")
        for name, x in zip(names, inputs, strict=True):
            if not isinstance(x, mx.array | Spec):
                raise self.error(f"input {name} must be an mx.array, not {_kind(x)}")

    def template(self) -> list[tuple[str, TemplateValue]]:
        """The template's values, in declared order."""
        values, pairs = self.values, self.kernel.program.template
        declared = tuple(name for name, _ in pairs)
        if not isinstance(values, Mapping):
            raise self.error(f"template must be a dict of values by name, not {_kind(values)}")
        if set(values) != set(declared):
            raise self.error(f"has template parameters {declared}, not {tuple(values)}")
        return [(name, self._template_value(name, kind, values[name])) for name, kind in pairs]

    def _template_value(self, name: str, kind: str, value: TemplateValue) -> TemplateValue:
        if kind == "typename" and isinstance(value, mx.Dtype) and value in TYPES:
            return value
        # A negative value would become part of the function's name.
        limit = {"int": _LIMIT_32, "bool": 2}.get(kind, 0)
        if isinstance(value, int) and 0 <= value < limit:
            return bool(value) if kind == "bool" else int(value)
        wanted = {"typename": "a Metal dtype", "bool": "a bool"}.get(kind, "an int from 0")
        raise self.error(f"template parameter {name} must be {wanted}, not {value!r}")

    def memory(self, backend: str) -> None:
        used = self._declared(self.kernel.threadgroup_memory)
        if used > (most := device_of(backend).threadgroup_memory):
            raise self.error(
                f"needs {used} bytes of threadgroup memory with {dict(self.values)}, there are "
                f"{most}"
            )

    def registers(self, backend: str, threads: int) -> None:
        """Where a thread has few, larger threadgroups are refused when they are launched."""
        held = self._declared(self.kernel.registers) if device_of(backend).few_registers else 0
        if threads > (most := most_threads(held)):
            raise self.error(
                f"has {threads} threads with {held} words of arrays each with "
                f"{dict(self.values)}; M1 and M2 have registers for {most}"
            )

    def _declared(self, demand: int | Callable[..., int]) -> int:
        return demand(**self.values) if callable(demand) else demand

    def input(self, x: mx.array | Spec, parameter: Parameter) -> None:
        """Check that MLX passes what the function declares."""
        name = parameter.name
        if x.dtype != (declared := self._dtype(parameter)):
            raise self.error(f"input {name} is {x.dtype}, declared as {declared}")
        if parameter.space != "device":
            if parameter.reference and x.ndim > 0:
                raise self.error(
                    f"input {name} is a reference, its shape must be (), not {x.shape}"
                )
            if not parameter.reference and (x.ndim == 0 or x.size >= CONSTANT_BELOW):
                raise self.error(
                    f"input {name} is declared constant: it must have an axis and less than "
                    f"{CONSTANT_BELOW} elements, not shape {x.shape}"
                )
        elif x.ndim == 0 and not parameter.padded:
            raise self.error(f"reads the shape of input {name}, which has no axis")
        elif x.size >= _LIMIT_32 and not self.kernel.large:
            raise self.error(f"input {name} {x.shape} needs 64-bit offsets")

    def _dtype(self, parameter: Parameter) -> mx.Dtype:
        value = self.values.get(parameter.type, _DTYPES.get(parameter.type))
        if not isinstance(value, mx.Dtype):
            raise self.error(f"MLX cannot pass {parameter.name} as {parameter.type}")
        return value

    def size(self, what: str, value: Any) -> Size:
        try:
            x, y, z = map(index, value)
        except (TypeError, ValueError):
            raise self.error(f"{what} must be three integers (x, y, z), not {value!r}") from None
        return x, y, z

    def threads(self, grid: Size, threadgroup: Size) -> None:
        threads, most = prod(threadgroup), self.kernel.max_threads
        if min(*grid, *threadgroup) < 1:
            raise self.error(f"grid {grid} and threadgroup {threadgroup} must be positive")
        if max(grid) >= _LIMIT_32:
            raise self.error(f"grid {grid} has more than 2^31 - 1 threads along an axis")
        if threads > most:
            raise self.error(f"threadgroup {threadgroup} has {threads} threads, at most {most}")
        whole = not any(g % t for g, t in zip(grid, threadgroup, strict=True))
        if self.kernel.program.cooperative and not whole:
            raise self.error(
                f"its threads exchange data: grid {grid} must be whole threadgroups {threadgroup}"
            )

    def output_dtypes(self, given: Sequence[mx.Dtype] | None) -> list[mx.Dtype]:
        dtypes = [self._dtype(parameter) for parameter in self.kernel.program.outputs]
        if self.kernel.program.atomic_outputs and any(dtype.size != 4 for dtype in dtypes):
            raise self.error(f"atomic outputs have 32 bits, not {dtypes}")
        if given is not None and str(given) not in (str(dtypes), str(tuple(dtypes))):
            raise self.error(f"its outputs are {dtypes}, output_dtypes must not be {given!r}")
        return dtypes

    def output_shapes(self, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        names = self.kernel.program.output_names
        if not isinstance(shapes, (list, tuple)):
            raise self.error(f"output_shapes must be a list of shapes, not {_kind(shapes)}")
        if len(shapes) != len(names):
            raise self.error(f"has {len(names)} outputs {names}, not {len(shapes)}")
        found = [self._shape(*item) for item in zip(names, shapes, strict=True)]
        if not self.kernel.large and any(prod(shape) >= _LIMIT_32 for shape in found):
            raise self.error(f"outputs {found} need 64-bit offsets")
        return found

    def _shape(self, name: str, shape: Any) -> tuple[int, ...]:
        try:
            found = tuple(map(index, shape))
        except TypeError:
            found = (-1,)
        if any(not 0 <= n < _LIMIT_32 for n in found):
            raise self.error(f"the shape of output {name} must be integers from 0, not {shape!r}")
        return found

    def multiples(self, inputs: Inputs) -> None:
        for name, axis, of in self.kernel.multiples:
            shape = inputs[self.kernel.program.input_names.index(name)].shape
            if not -len(shape) <= axis < len(shape):
                raise self.error(f"input {name} {shape} has no axis {axis}")
            number = self.values[of] if isinstance(of, str) else of
            if isinstance(number, int) and shape[axis] % number:
                stated = of if number == of else f"{of} = {number}"
                raise self.error(
                    f"axis {axis} of input {name} must be a multiple of {stated}, not {shape[axis]}"
                )


def _kind(value: object) -> str:
    return type(value).__name__
