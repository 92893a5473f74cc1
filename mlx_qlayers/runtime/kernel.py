"""A kernel, declared once and called like a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from math import prod
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

import mlx.core as mx

from .backend import BackendError, backend, current, epoch
from .explain import Row, count, note, planned, row
from .generated_source import TYPES
from .health import WORDS, check_report, checking
from .launch import Bound, Launch, Size, TemplateValue
from .parse import parse
from .program import Parameter, Program
from .source import METAL, SourceError
from .spec import Spec
from .tracing import record, tracing
from .transformed import is_transformed, without_derivative

# What every Apple GPU of MLX's offers a threadgroup.
MAX_THREADS = 1024
MAX_THREADGROUP_MEMORY = 32 * 1024
# What a kernel may declare there; only layouts of CUDA's own need more than Metal has.
CUDA_THREADGROUP_MEMORY = 48 * 1024
# Kernels index with 32 bits unless they say otherwise.
_LIMIT_32 = 2**31
# Launches of direct calls that are kept.
_KEPT = 512
_DTYPES = {name: dtype for dtype, name in TYPES.items()}


class KernelError(ValueError):
    """A kernel's declaration or a call of it is wrong; the message names the kernel."""


@dataclass(frozen=True)
class Multiple:
    """The extent of one axis of an input must be a multiple of a number.

    Attributes:
        input: the input's name.
        axis: the axis.
        of: the number, or the name of the template parameter that holds it.
    """

    input: str
    axis: int
    of: int | str


@dataclass(frozen=True, eq=False)
class Kernel:
    """A Metal kernel: where it is written, what it takes and what it needs.

    Nothing is read, compiled or checked before the first call. The names given here must be those
    of the Metal function's signature, in the same order; a difference is an error at that call.

    Args:
        name: the kernel's name, unique in the package; errors and traces name it.
        file: the ``.metal`` file; a plain name is looked up in ``mlx_qlayers/metal``.
        inputs: the names of the inputs, in order.
        outputs: the names of the outputs, in order.
        template: the names of the template's parameters, in order.
        function: the function in the file, if not called ``name``.
        omitted: pointers of the function that this kernel does not pass; they are null in it.
        atomic_outputs: whether the outputs are atomics. MLX then makes every output atomic.
        max_threads: the largest threadgroup that it may be launched with.
        threadgroup_memory: the bytes of threadgroup memory that it takes, or a function that
            returns them for the template's values, passed by name.
        multiples: what the extents of inputs must be multiples of.
        large: whether its offsets have 64 bits, so that arrays of 2^31 elements may be passed.
        ensure_row_contiguous: whether inputs that are not row-contiguous are copied first.
        errors: what the codes 1, 2, ... of its ``health_check`` statements mean.

    Example:
        >>> exp = Kernel("exp_forward", "exp/exp.metal", ("x",), ("y",), template=("T",))
        >>> x = mx.ones(1000)
        >>> (y,) = exp(
        ...     [x],
        ...     template={"T": x.dtype},
        ...     grid=(x.size, 1, 1),
        ...     threadgroup=(256, 1, 1),
        ...     output_shapes=[x.shape],
        ... )
    """

    name: str
    file: str | Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[str, ...] = ()
    function: str = ""
    omitted: tuple[str, ...] = ()
    atomic_outputs: bool = False
    max_threads: int = MAX_THREADS
    threadgroup_memory: int | Callable[..., int] = 0
    multiples: tuple[Multiple, ...] = ()
    large: bool = False
    ensure_row_contiguous: bool = True
    errors: tuple[str, ...] = ()

    @cached_property
    def program(self) -> Program:
        """The kernel's text, read from its file at first use.

        Raises:
            KernelError: the file or the function's signature is not what this declaration says.
        """
        program = self._load(self.name)
        for what, declared, written in (
            ("inputs", self.inputs, program.input_names),
            ("outputs", self.outputs, program.output_names),
            ("template", self.template, tuple(name for name, _ in program.template)),
            ("atomic_outputs", self.atomic_outputs, program.atomic_outputs),
        ):
            if declared != written:
                raise self._error(f"{what} declared as {declared}, {self.file} has {written}")
        if self.max_threads > MAX_THREADS:
            raise self._error(f"max_threads is {self.max_threads}, Metal has {MAX_THREADS}")
        return program

    @cached_property
    def _program_with_health(self) -> Program:
        return self._load(f"{self.name}_health", health=True)

    def _load(self, name: str, *, health: bool = False) -> Program:
        try:
            return parse(
                METAL / self.file,
                self.function or self.name,
                name,
                ensure_row_contiguous=self.ensure_row_contiguous,
                health=health,
                omitted=self.omitted,
            )
        except (SourceError, OSError) as error:
            raise self._error(str(error)) from error

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[Sequence[int]],
        template: Mapping[str, TemplateValue] | None = None,
        output_dtypes: Sequence[mx.Dtype] | None = None,
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Launch the kernel on the current backend.

        Args:
            inputs: one array for each name in ``inputs``.
            grid: the number of threads in x, y and z.
            threadgroup: the threads of one threadgroup in x, y and z.
            output_shapes: one shape for each output.
            template: a value for each template parameter.
            output_dtypes: one dtype for each output; by default what the function declares.
            init_value: fill the outputs with this first. Without it they hold anything.

        Returns:
            One array for each output.

        Raises:
            KernelError: something does not fit the declaration or the limits of the hardware.
            BackendError: the current backend is ``ops``, or one that cannot run.
        """
        values = {} if template is None else template
        try:
            call = (
                *(tuple(grid), tuple(threadgroup), tuple(map(tuple, output_shapes))),
                *(tuple(values.items()), output_dtypes and tuple(output_dtypes), init_value),
            )
            specs = tuple([(x.shape, x.dtype) for x in inputs])
            # Spelled out too, since 4.0 equals 4.
            launch = _kept(self, specs, call, str(call), current.get(), epoch.debug, epoch.number)
        except (TypeError, AttributeError):
            launch = self.bind(
                inputs,
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=output_shapes,
                template=template,
                output_dtypes=output_dtypes,
                init_value=init_value,
            )
        return launch(list(inputs))

    def bind(
        self,
        inputs: Sequence[mx.array | Spec],
        *,
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[Sequence[int]],
        template: Mapping[str, TemplateValue] | None = None,
        output_dtypes: Sequence[mx.Dtype] | None = None,
        init_value: float | None = None,
    ) -> Bound:
        """Check a launch once, for all arrays of these shapes and dtypes, on the current backend.

        Args:
            inputs: arrays, or their shapes and dtypes; the others are those of a call.

        Returns:
            A function of a list of such arrays that launches and gives a list of outputs. Whoever
            keeps it answers for it that the arrays are such: they are not looked at again.

        Raises:
            KernelError: something does not fit the declaration or the limits of the hardware.
            BackendError: the current backend is ``ops``, or one that cannot run.
        """
        name = self._backend()
        if not (init_value is None or isinstance(init_value, Real)):
            raise self._error(f"init_value must be a number or None, not {init_value!r}")
        values = {} if template is None else template
        launch = self._checked(inputs, values, grid, threadgroup, output_shapes, output_dtypes)
        if init_value is not None:
            launch = replace(launch, init_value=init_value)
        if checking():
            run = self._bind_health(name, launch)
        else:
            run = import_module(f".{name}", __package__).bind(launch)
        if tracing():
            run = _recorded(name, launch, run)
        kernel_row = row(f"kernel {self.name}", name, "launched")
        return run if planned(kernel_row) else _counted(kernel_row, run)

    def _backend(self) -> str:
        name = backend()
        if name == "ops":
            raise BackendError(f"kernel {self.name} was called, but the ops backend runs none")
        return name

    def _bind_health(self, name: str, launch: Launch) -> Bound:
        """Run the kernel with a health buffer, which like all outputs is zero at first."""
        bind = import_module(f".{name}", __package__).bind
        if launch.init_value:
            note(f"kernel {self.name}", "unchecked", f"init_value {launch.init_value} is not 0")
            return bind(launch)
        run = bind(
            replace(
                launch,
                program=self._program_with_health,
                output_shapes=[*launch.output_shapes, (WORDS,)],
                output_dtypes=[*launch.output_dtypes, mx.uint32],
                init_value=0.0,
            )
        )
        return lambda arrays: check_report(self.name, self.errors, launch.grid, run(arrays))

    def _checked(
        self,
        inputs: Sequence[mx.array | Spec],
        values: Mapping[str, TemplateValue],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype] | None,
    ) -> Launch:
        """Check the declaration, and a call but for the values of its inputs."""
        program = self.program
        self._check_arrays(inputs)
        template = self._template(values)
        self._check_dtypes(inputs, values)
        self._check_inputs(inputs)
        grid, threadgroup = self._size("grid", grid), self._size("threadgroup", threadgroup)
        self._check_threads(grid, threadgroup)
        dtypes = self._output_dtypes(values, output_dtypes)
        self._check_multiples(inputs, values)
        shapes, specs = self._shapes(output_shapes), [Spec.of(x) for x in inputs]
        return Launch(program, specs, template, grid, threadgroup, shapes, dtypes)

    def _check_arrays(self, inputs: Sequence[mx.array | Spec]) -> None:
        if not isinstance(inputs, (list, tuple)):
            raise self._error(f"inputs must be a list of arrays, not {_kind(inputs)}")
        if len(inputs) != len(self.inputs):
            raise self._error(f"takes {len(self.inputs)} inputs {self.inputs}, not {len(inputs)}")
        for name, x in zip(self.inputs, inputs, strict=True):
            if not isinstance(x, mx.array | Spec):
                raise self._error(f"input {name} must be an mx.array, not {_kind(x)}")

    def _template(self, values: Mapping[str, TemplateValue]) -> list[tuple[str, TemplateValue]]:
        if not isinstance(values, Mapping):
            raise self._error(f"template must be a dict of values by name, not {_kind(values)}")
        if set(values) != set(self.template):
            raise self._error(f"has template parameters {self.template}, not {tuple(values)}")
        found = [
            (name, self._template_value(name, kind, values[name]))
            for name, kind in self.program.template
        ]
        memory = self.threadgroup_memory
        used = memory(**values) if callable(memory) else memory
        most = CUDA_THREADGROUP_MEMORY if backend() == "cuda" else MAX_THREADGROUP_MEMORY
        if used > most:
            raise self._error(
                f"needs {used} bytes of threadgroup memory with {dict(values)}, there are {most}"
            )
        return found

    def _check_dtypes(
        self, inputs: Sequence[mx.array | Spec], values: Mapping[str, TemplateValue]
    ) -> None:
        for x, parameter in zip(inputs, self.program.inputs, strict=True):
            if x.dtype != (declared := self._dtype(parameter, values)):
                raise self._error(f"input {parameter.name} is {x.dtype}, declared as {declared}")

    def _output_dtypes(
        self, values: Mapping[str, TemplateValue], given: Sequence[mx.Dtype] | None
    ) -> list[mx.Dtype]:
        dtypes = [self._dtype(parameter, values) for parameter in self.program.outputs]
        if self.program.atomic_outputs and any(dtype.size != 4 for dtype in dtypes):
            raise self._error(f"atomic outputs have 32 bits, not {dtypes}")
        if given is not None and str(given) not in (str(dtypes), str(tuple(dtypes))):
            raise self._error(f"its outputs are {dtypes}, output_dtypes must not be {given!r}")
        return dtypes

    def _template_value(self, name: str, kind: str, value: TemplateValue) -> TemplateValue:
        if kind == "typename" and isinstance(value, mx.Dtype) and value in TYPES:
            return value
        # A negative value would become part of the function's name.
        limit = {"int": _LIMIT_32, "bool": 2}.get(kind, 0)
        if isinstance(value, int) and 0 <= value < limit:
            return bool(value) if kind == "bool" else int(value)
        wanted = {"typename": "a Metal dtype", "bool": "a bool"}.get(kind, "an int from 0")
        raise self._error(f"template parameter {name} must be {wanted}, not {value!r}")

    def _dtype(self, parameter: Parameter, values: Mapping[str, TemplateValue]) -> mx.Dtype:
        value = values.get(parameter.type, _DTYPES.get(parameter.type))
        if not isinstance(value, mx.Dtype):
            raise self._error(f"MLX cannot pass {parameter.name} as {parameter.type}")
        return value

    def _size(self, what: str, value: Size) -> Size:
        try:
            x, y, z = map(index, value)
        except (TypeError, ValueError):
            raise self._error(f"{what} must be three integers (x, y, z), not {value!r}") from None
        return x, y, z

    def _check_threads(self, grid: Size, threadgroup: Size) -> None:
        gx, gy, gz = grid
        tx, ty, tz = threadgroup
        if min(gx, gy, gz, tx, ty, tz) < 1:
            raise self._error(f"grid {grid} and threadgroup {threadgroup} must be positive")
        if max(gx, gy, gz) >= _LIMIT_32:
            raise self._error(f"grid {grid} has more than 2^31 - 1 threads along an axis")
        if tx * ty * tz > self.max_threads:
            raise self._error(
                f"threadgroup {threadgroup} has {tx * ty * tz} threads, at most {self.max_threads}"
            )
        if self.program.cooperative and (gx % tx or gy % ty or gz % tz):
            raise self._error(
                f"its threads exchange data: grid {grid} must be whole threadgroups {threadgroup}"
            )

    def _shapes(self, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        if not isinstance(shapes, (list, tuple)):
            raise self._error(f"output_shapes must be a list of shapes, not {_kind(shapes)}")
        if len(shapes) != len(self.outputs):
            raise self._error(f"has {len(self.outputs)} outputs {self.outputs}, not {len(shapes)}")
        found = [self._shape(*item) for item in zip(self.outputs, shapes, strict=True)]
        if not self.large and any(prod(shape) >= _LIMIT_32 for shape in found):
            raise self._error(f"outputs {found} need 64-bit offsets")
        return found

    def _shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        try:
            found = tuple(map(index, shape))
        except TypeError:
            found = (-1,)
        if any(not 0 <= n < _LIMIT_32 for n in found):
            raise self._error(f"the shape of output {name} must be integers from 0, not {shape!r}")
        return found

    @cached_property
    def _limited(self) -> list[tuple[int, Parameter]]:
        """The inputs that not every shape goes with."""
        return [
            (i, parameter)
            for i, parameter in enumerate(self.program.inputs)
            if not (self.large and parameter.space == "device" and parameter.padded)
        ]

    def _check_inputs(self, inputs: Sequence[mx.array | Spec]) -> None:
        """What MLX passes must be what the function declares."""
        for i, parameter in self._limited:
            x = inputs[i]
            if parameter.space != "device":
                if why := parameter.constant_refuses(x):
                    raise self._error(why)
            elif x.ndim == 0 and not parameter.padded:
                raise self._error(f"reads the shape of input {parameter.name}, which has no axis")
            elif x.size >= _LIMIT_32 and not self.large:
                raise self._error(f"input {parameter.name} {x.shape} needs 64-bit offsets")

    def _check_multiples(
        self, inputs: Sequence[mx.array | Spec], values: Mapping[str, TemplateValue]
    ) -> None:
        for multiple in self.multiples:
            shape = inputs[self.inputs.index(multiple.input)].shape
            if not -len(shape) <= multiple.axis < len(shape):
                raise self._error(f"input {multiple.input} {shape} has no axis {multiple.axis}")
            extent = shape[multiple.axis]
            of = values[multiple.of] if isinstance(multiple.of, str) else multiple.of
            if isinstance(of, int) and extent % of:
                raise self._error(
                    f"axis {multiple.axis} of input {multiple.input} must be a multiple of "
                    f"{multiple.of if of == multiple.of else f'{multiple.of} = {of}'}, not {extent}"
                )

    def _error(self, message: str) -> KernelError:
        return KernelError(f"kernel {self.name}: {message}")


def _kind(value: object) -> str:
    return type(value).__name__


@lru_cache(maxsize=_KEPT)
def _kept(
    kernel: Kernel, specs: tuple[tuple[Any, Any], ...], call: tuple[Any, ...], *_: object
) -> Bound:
    """The launch of direct calls that are alike."""
    grid, threadgroup, shapes, template, dtypes, init_value = call
    run = kernel.bind(
        [Spec(*spec) for spec in specs],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=shapes,
        template=dict(template),
        output_dtypes=dtypes,
        init_value=init_value,
    )
    if backend() != "host":
        return run

    def launch(arrays: list[mx.array]) -> list[mx.array]:
        # On host a launch gives constants, through which no gradient would flow.
        if arrays and is_transformed(arrays):
            return without_derivative(lambda: run(arrays), arrays)
        return run(arrays)

    return launch


def _counted(kernel_row: Row, run: Bound) -> Bound:
    rows = (kernel_row,)

    def launch(arrays: list[mx.array]) -> list[mx.array]:
        count(rows)
        return run(arrays)

    return launch


def _recorded(name: str, launch: Launch, run: Bound) -> Bound:
    def recorded(arrays: list[mx.array]) -> list[mx.array]:
        outputs = run(arrays)
        record(name, launch)
        return outputs

    return recorded
