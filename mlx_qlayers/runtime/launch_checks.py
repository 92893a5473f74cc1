"""What is checked of a launch, once for all arrays of the same shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from numbers import Real
from operator import index

import mlx.core as mx

from .declaration import CUDA_THREADGROUP_MEMORY, MAX_THREADGROUP_MEMORY, Declaration
from .generated_source import TYPES
from .launch import Launch, Size, TemplateValue
from .program import Parameter
from .spec import Spec

# Kernels index with 32 bits unless they say otherwise.
_LIMIT_32 = 2**31
_DTYPES = {name: dtype for dtype, name in TYPES.items()}


def checked_launch(
    kernel: Declaration,
    backend: str,
    inputs: Sequence[mx.array | Spec],
    *,
    grid: Size,
    threadgroup: Size,
    output_shapes: Sequence[Sequence[int]],
    template: Mapping[str, TemplateValue] | None,
    output_dtypes: Sequence[mx.Dtype] | None,
    init_value: float | None,
) -> Launch:
    """The launch that a backend is asked for.

    Raises:
        KernelError: something does not fit the declaration or the limits of the hardware.
    """
    program, values = kernel.program, {} if template is None else template
    _check_count(kernel, inputs)
    ordered = _template(kernel, values)
    _check_memory(kernel, values, backend)
    for x, parameter in zip(inputs, program.inputs, strict=True):
        _check_input(kernel, x, parameter, values)
    grid, threadgroup = _size(kernel, "grid", grid), _size(kernel, "threadgroup", threadgroup)
    _check_threads(kernel, grid, threadgroup)
    dtypes = _output_dtypes(kernel, values, output_dtypes)
    _check_multiples(kernel, inputs, values)
    shapes, specs = _shapes(kernel, output_shapes), [Spec.of(x) for x in inputs]
    if not (init_value is None or isinstance(init_value, Real)):
        raise kernel.error(f"init_value must be a number or None, not {init_value!r}")
    return Launch(program, specs, ordered, grid, threadgroup, shapes, dtypes, init_value)


def _check_count(kernel: Declaration, inputs: Sequence[mx.array | Spec]) -> None:
    if not isinstance(inputs, (list, tuple)):
        raise kernel.error(f"inputs must be a list of arrays, not {_kind(inputs)}")
    if len(inputs) != len(kernel.inputs):
        raise kernel.error(f"takes {len(kernel.inputs)} inputs {kernel.inputs}, not {len(inputs)}")
    for name, x in zip(kernel.inputs, inputs, strict=True):
        if not isinstance(x, mx.array | Spec):
            raise kernel.error(f"input {name} must be an mx.array, not {_kind(x)}")


def _template(
    kernel: Declaration, values: Mapping[str, TemplateValue]
) -> list[tuple[str, TemplateValue]]:
    if not isinstance(values, Mapping):
        raise kernel.error(f"template must be a dict of values by name, not {_kind(values)}")
    if set(values) != set(kernel.template):
        raise kernel.error(f"has template parameters {kernel.template}, not {tuple(values)}")
    return [
        (name, _template_value(kernel, name, kind, values[name]))
        for name, kind in kernel.program.template
    ]


def _template_value(
    kernel: Declaration, name: str, kind: str, value: TemplateValue
) -> TemplateValue:
    if kind == "typename" and isinstance(value, mx.Dtype) and value in TYPES:
        return value
    # A negative value would become part of the function's name.
    limit = {"int": _LIMIT_32, "bool": 2}.get(kind, 0)
    if isinstance(value, int) and 0 <= value < limit:
        return bool(value) if kind == "bool" else int(value)
    wanted = {"typename": "a Metal dtype", "bool": "a bool"}.get(kind, "an int from 0")
    raise kernel.error(f"template parameter {name} must be {wanted}, not {value!r}")


def _check_memory(kernel: Declaration, values: Mapping[str, TemplateValue], backend: str) -> None:
    memory = kernel.threadgroup_memory
    used = memory(**values) if callable(memory) else memory
    most = CUDA_THREADGROUP_MEMORY if backend == "cuda" else MAX_THREADGROUP_MEMORY
    if used > most:
        raise kernel.error(
            f"needs {used} bytes of threadgroup memory with {dict(values)}, there are {most}"
        )


def _check_input(
    kernel: Declaration,
    x: mx.array | Spec,
    parameter: Parameter,
    values: Mapping[str, TemplateValue],
) -> None:
    """What MLX passes must be what the function declares."""
    name = parameter.name
    if x.dtype != (declared := _dtype(kernel, parameter, values)):
        raise kernel.error(f"input {name} is {x.dtype}, declared as {declared}")
    if parameter.space != "device":
        if why := parameter.constant_refuses(x):
            raise kernel.error(why)
    elif x.ndim == 0 and not parameter.padded:
        raise kernel.error(f"reads the shape of input {name}, which has no axis")
    elif x.size >= _LIMIT_32 and not kernel.large:
        raise kernel.error(f"input {name} {x.shape} needs 64-bit offsets")


def _dtype(
    kernel: Declaration, parameter: Parameter, values: Mapping[str, TemplateValue]
) -> mx.Dtype:
    value = values.get(parameter.type, _DTYPES.get(parameter.type))
    if not isinstance(value, mx.Dtype):
        raise kernel.error(f"MLX cannot pass {parameter.name} as {parameter.type}")
    return value


def _output_dtypes(
    kernel: Declaration,
    values: Mapping[str, TemplateValue],
    given: Sequence[mx.Dtype] | None,
) -> list[mx.Dtype]:
    dtypes = [_dtype(kernel, parameter, values) for parameter in kernel.program.outputs]
    if kernel.program.atomic_outputs and any(dtype.size != 4 for dtype in dtypes):
        raise kernel.error(f"atomic outputs have 32 bits, not {dtypes}")
    if given is not None and str(given) not in (str(dtypes), str(tuple(dtypes))):
        raise kernel.error(f"its outputs are {dtypes}, output_dtypes must not be {given!r}")
    return dtypes


def _size(kernel: Declaration, what: str, value: Size) -> Size:
    try:
        x, y, z = map(index, value)
    except (TypeError, ValueError):
        raise kernel.error(f"{what} must be three integers (x, y, z), not {value!r}") from None
    return x, y, z


def _check_threads(kernel: Declaration, grid: Size, threadgroup: Size) -> None:
    threads = prod(threadgroup)
    if min(*grid, *threadgroup) < 1:
        raise kernel.error(f"grid {grid} and threadgroup {threadgroup} must be positive")
    if max(grid) >= _LIMIT_32:
        raise kernel.error(f"grid {grid} has more than 2^31 - 1 threads along an axis")
    if threads > kernel.max_threads:
        raise kernel.error(
            f"threadgroup {threadgroup} has {threads} threads, at most {kernel.max_threads}"
        )
    if kernel.program.cooperative and any(g % t for g, t in zip(grid, threadgroup, strict=True)):
        raise kernel.error(
            f"its threads exchange data: grid {grid} must be whole threadgroups {threadgroup}"
        )


def _shapes(kernel: Declaration, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    names = kernel.outputs
    if not isinstance(shapes, (list, tuple)):
        raise kernel.error(f"output_shapes must be a list of shapes, not {_kind(shapes)}")
    if len(shapes) != len(names):
        raise kernel.error(f"has {len(names)} outputs {names}, not {len(shapes)}")
    found = [_shape(kernel, *item) for item in zip(names, shapes, strict=True)]
    if not kernel.large and any(prod(shape) >= _LIMIT_32 for shape in found):
        raise kernel.error(f"outputs {found} need 64-bit offsets")
    return found


def _shape(kernel: Declaration, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(map(index, shape))
    except TypeError:
        found = (-1,)
    if any(not 0 <= n < _LIMIT_32 for n in found):
        raise kernel.error(f"the shape of output {name} must be integers from 0, not {shape!r}")
    return found


def _check_multiples(
    kernel: Declaration, inputs: Sequence[mx.array | Spec], values: Mapping[str, TemplateValue]
) -> None:
    for multiple in kernel.multiples:
        shape = inputs[kernel.inputs.index(multiple.input)].shape
        if not -len(shape) <= multiple.axis < len(shape):
            raise kernel.error(f"input {multiple.input} {shape} has no axis {multiple.axis}")
        extent = shape[multiple.axis]
        of = values[multiple.of] if isinstance(multiple.of, str) else multiple.of
        if isinstance(of, int) and extent % of:
            raise kernel.error(
                f"axis {multiple.axis} of input {multiple.input} must be a multiple of "
                f"{multiple.of if of == multiple.of else f'{multiple.of} = {of}'}, not {extent}"
            )


def _kind(value: object) -> str:
    return type(value).__name__
