"""Launches of this package's kernels: bind them, fill in addresses, run, return the outputs."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from ..backend import BackendError, within
from ..explain import collectors, count
from ..launch import Bound, Launch
from ..program import Program
from ..source import METAL, TENSOR_OPS, without
from ..spec import Spec
from . import array_memory as memory
from .compiled_kernel import DEFAULT_BUDGET, Counters, HostKernel, check_grid, compile_source
from .errors import CompileError
from .lint import refuse
from .output_buffers import SMALL, SmallOutput, capsule, large_output, npy_header, small_output

_PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n#line 1 "source.metal"\n'
# Of the fast build, which has the functions of a file in vectors.
_WIDE_PREAMBLE, _WIDE = "#include <metal_wide>\n" + _PREAMBLE, (METAL / "common/wide.metal",)
_ENVIRONMENT = "MLX_QLAYERS_HOST_CHECKS"


@dataclass
class Report:
    """A summary of the checked launches of a ``with checks()`` block."""

    budget: int = DEFAULT_BUDGET  # the loop turns that each launch may take
    flush_subnormals: bool = False  # whether matrix products take subnormal halves for zero
    tensor_layout: str = "random"  # how cooperative tensors are spread over lanes
    # The kernel's name and its counters, in order.
    launches: MutableSequence[tuple[str, Counters]] = field(default_factory=list)

    def total(self, name: str, kernel: str | None = None) -> int:
        """The sum of one counter over all launches, or over those of one kernel."""
        return sum(getattr(c, name) for k, c in self.launches if kernel in (None, k))


_everywhere = os.environ.get(_ENVIRONMENT, "0") not in ("", "0")
_report: ContextVar[Report | None] = ContextVar(
    "mlx_qlayers_checks", default=Report(launches=deque(maxlen=0)) if _everywhere else None
)


@contextmanager
def checks(
    enabled: bool = True,
    *,
    budget: int = DEFAULT_BUDGET,
    flush_subnormals: bool = False,
    tensor_layout: str = "random",
) -> Iterator[Report]:
    """Run the launches of a ``with`` block on the checked build (or, with False, on the fast one).

    These are the launches of this thread or async task; another takes part if it begins with
    :func:`contextvars.copy_context`. ``MLX_QLAYERS_HOST_CHECKS=1`` turns the checks on everywhere.

    Args:
        enabled: whether to check.
        budget: the loop turns after which a launch counts as hanging.
        flush_subnormals: whether matrix products take subnormal halves for zero, as those of some
            GPUs may.
        tensor_layout: how the elements of cooperative tensors are spread over lanes: as an
            ``"m5"``, in ``"strips"`` of neighbours, at ``"random"``, anew in each launch and with
            slots that hold none, or likewise and ``"apart"``: no tensor is compatible with another.

    Raises:
        KernelFault: in the block, at the launch that did something wrong.

    Example:
        >>> from mlx_qlayers.ops.exp import exp
        >>> with use_backend("host"), checks() as report:
        ...     y = exp(mx.ones(16))
        >>> report.total("bytes_read")
        64
    """
    report = Report(budget, flush_subnormals, tensor_layout)
    with within(_report, report if enabled else None):
        yield report


# Packed codes are operands from macOS 26.4 on; other tensor operations come with 26.2.
_CODES = {"__ENVIRONMENT_OS_VERSION_MIN_REQUIRED__": "260400"}


class _Compiled(NamedTuple):
    """A kernel compiled for one set of types, and where its buffers come from, by their indices."""

    kernel: HostKernel
    inputs: list[tuple[int, int]]
    shapes: list[tuple[int, int, Callable[[Spec | mx.array], Any]]]
    strides: dict[int, int]
    outputs: list[int]


def _shape(x: Spec | mx.array) -> Any:
    return (ctypes.c_int * max(1, x.ndim))(*x.shape)


def _ndim(x: Spec | mx.array) -> Any:
    return ctypes.c_int(x.ndim)


def _strides(steps: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(1, len(steps)))(*steps)


@cache
def _say(name: str) -> None:
    """A kernel that is compiled for several dtypes or options is one to the reader."""
    print(f"mlx-qlayers: compiling kernel {name} for this CPU, once", file=sys.stderr)


@lru_cache(maxsize=1024)
def _compiled(program: Program, function: str, text: str, checked: bool) -> _Compiled:
    def cite(message: str) -> str:
        return program.cite(message, text)

    def first(shared: str) -> None:
        refuse(shared.partition(_PREAMBLE)[2])
        _say(program.name)

    preamble, given = _PREAMBLE, text
    if not checked and (header := without(program.header, _WIDE)) != program.header:
        preamble, given = _WIDE_PREAMBLE, text.replace(program.header, header)
    try:
        kernel = compile_source(
            *(preamble + given, function),
            checked=checked,
            language=400 if TENSOR_OPS in text else 320,
            defines=_CODES if "int4b_format" in text else None,
            name=program.name,
            cite=cite,
            first=first,
        )
    except CompileError as error:
        raise CompileError(f"kernel {program.name}: {cite(str(error))}") from None
    at = {parameter.name: i for i, parameter in kernel.signature.buffers.items()}

    def slots(suffix: str) -> list[tuple[int, int]]:
        names = [name + suffix for name in program.input_names]
        return [(at[name], i) for i, name in enumerate(names) if name in at]

    return _Compiled(
        kernel,
        inputs=slots(""),
        shapes=[
            (slot, i, make)
            for suffix, make in (("_shape", _shape), ("_ndim", _ndim))
            for slot, i in slots(suffix)
        ],
        strides={i: slot for slot, i in slots("_strides")},
        outputs=[at[name] for name in program.output_names],
    )


def compiled_of(launch: Launch) -> _Compiled:
    """The fast build of a launch's kernel."""
    return _compiled(launch.program, launch.function, launch.text, False)


class _Strides:
    """Strides of an input, in elements: those of a row-contiguous array, and an array's own."""

    def __init__(self, slot: int, x: Spec) -> None:
        self.slot, self.itemsize, self.axes = slot, x.dtype.size, range(x.ndim)
        self._dense = _strides([prod(x.shape[axis + 1 :]) for axis in self.axes])
        self.own = _strides([0] * x.ndim)
        self.dense, self.own_address = map(ctypes.addressof, (self._dense, self.own))


class Frame:
    """The buffer of arguments, used again by the next launch that differs only in its arrays."""

    def __init__(self, compiled: _Compiled, launch: Launch) -> None:
        self.kernel = compiled.kernel
        self.addresses = (ctypes.c_uint64 * compiled.kernel.slots)()
        self.raw = compiled.kernel.raw(launch.grid, launch.threadgroup)
        self.raw.buffers = ctypes.addressof(self.addresses)
        self.raw_address = ctypes.addressof(self.raw)
        strides = {i: _Strides(s, launch.inputs[i]) for i, s in compiled.strides.items()}
        # A buffer's index, an input's, and where its strides go, if anywhere.
        self.inputs = [(slot, i, strides.get(i)) for slot, i in compiled.inputs]
        self.view = memory.PyBuffer()  # of an array that is not contiguous
        self.view_address = ctypes.addressof(self.view)
        self._shapes = [(slot, make(launch.inputs[i])) for slot, i, make in compiled.shapes]
        for slot, shape in self._shapes:
            self.addresses[slot] = ctypes.addressof(shape)
        value = launch.init_value
        # A buffer's index, and a small output, the header of a large one, or what makes one.
        self.outputs: list[tuple[int, SmallOutput | None, bytes, Any]] = []
        outputs = zip(compiled.outputs, launch.output_shapes, launch.output_dtypes, strict=True)
        for slot, shape, dtype in outputs:
            size = prod(shape) * dtype.size
            if 0 < size < SMALL and not value:
                self.outputs.append((slot, small_output(shape, dtype, value), b"", None))
            elif size and value is None:
                self.outputs.append((slot, None, npy_header(shape, dtype), None))
            else:
                start = mx.array(value or 0, dtype)
                filled = partial(mx.full, shape, start, stream=mx.cpu)
                self.outputs.append((slot, None, b"", filled))

    def take_strided(self, array: mx.array, slot: int, strides: _Strides) -> None:
        """Fill in the address and the strides of an array that is not row-contiguous."""
        memory.get_buffer(array, self.view_address, memory.STRIDED)
        self.addresses[slot], steps = self.view.buf or 0, self.view.strides
        for axis in strides.axes:
            strides.own[axis] = steps[axis] // strides.itemsize
        memory.release_buffer(self.view_address)
        self.addresses[strides.slot] = strides.own_address


def bind(launch: Launch) -> Bound:
    """A function that runs a launch and returns its outputs, one for each output shape.

    Inputs are read in place, outputs are written where MLX will read them, or copied if they are
    small; an input that must be row-contiguous and is not gets copied too.
    """
    check_grid(launch.program.name, launch.grid, launch.threadgroup)
    return _runner(launch, launch.rows("host"), launch.program.ensure_row_contiguous)


# Every launch of a kernel on a CPU comes through here: calls of Python functions are its cost.
# The list of inputs keeps them where they are.
def _runner(launch: Launch, rows: Any, contiguous: bool) -> Bound:
    frames: list[Frame] = []  # each serves one thread at a time
    view, address_of, evaluate, array = memory.view, ctypes.addressof, mx.eval, mx.array
    fill, report_of, ticks = ctypes.memset, _report.get, rows[0].ticks

    def run(inputs: list[mx.array]) -> list[mx.array]:
        try:
            evaluate(*inputs)
        except ValueError as error:
            raise _no_values(launch, error) from error
        if (report := report_of()) is not None:
            count(rows)
            return _run_checked(launch, inputs, report)
        try:
            frame = frames.pop()
        except IndexError:
            frame = Frame(compiled_of(launch), launch)
        if collectors:
            count(rows)
        else:
            next(ticks)
        addresses, made = frame.addresses, []
        for slot, i, strides in frame.inputs:
            try:
                addresses[slot] = address_of(view(inputs[i]))
            except (TypeError, ValueError):
                if strides is not None and not contiguous:
                    frame.take_strided(inputs[i], slot, strides)
                    continue
                inputs[i] = memory.readable(inputs[i], contiguous)
                addresses[slot] = memory.locate(inputs[i])
            if strides is not None:
                addresses[strides.slot] = strides.dense
        for slot, small, header, filled in frame.outputs:
            if small is not None:
                try:
                    block = small.free.pop()
                except IndexError:
                    block = small.block()
                made.append(block)
                small.tensor.data = addresses[slot] = address_of(block)
                if small.zero:
                    fill(block, 0, small.bytes)
            elif header:
                large, addresses[slot] = large_output(header)
                made.append(large)
            else:
                made.append(filled())
                addresses[slot] = memory.locate(made[-1])
        if frame.kernel.launch(frame.raw_address):
            frame.kernel.fail(frame.raw)
        for i, (_, small, _, _) in enumerate(frame.outputs):
            if small is not None:
                block, made[i] = made[i], array(capsule(small.tensor_address, b"dltensor", None))
                small.free.append(block)
        frames.append(frame)
        return made

    vars(run)["launch"] = launch  # for lists of launches
    return run


def checking() -> bool:
    """Whether launches run on the checked build here."""
    return _report.get() is not None


def _no_values(launch: Launch, error: ValueError) -> Exception:
    if "transformations" not in str(error):
        return error
    return BackendError(
        f"kernel {launch.program.name}: mx.compile or mx.vmap is tracing the inputs, and the host "
        "backend needs their values. Leave the call out of the compiled function, or "
        'use_backend("reference")'
    )


def _run_checked(launch: Launch, inputs: list[mx.array], report: Report) -> list[mx.array]:
    compiled = _compiled(launch.program, launch.function, launch.text, True)
    contiguous = launch.program.ensure_row_contiguous
    inputs = [memory.readable(x, contiguous) for x in inputs]
    outputs = zip(launch.output_shapes, launch.output_dtypes, strict=True)
    start = launch.init_value or 0
    made = [mx.full(shape, mx.array(start, dtype), stream=mx.cpu) for shape, dtype in outputs]
    mx.eval(made)
    buffers = {slot: memory.extent(inputs[i]) for slot, i in compiled.inputs}
    facts = {slot: make(inputs[i]) for slot, i, make in compiled.shapes}
    facts |= {slot: _strides(memory.strides(inputs[i])) for i, slot in compiled.strides.items()}
    buffers |= {slot: memory.extent(fact) for slot, fact in facts.items()}
    for slot, x in zip(compiled.outputs, made, strict=True):
        buffers[slot] = memory.extent(x)
        buffers[slot].writable, buffers[slot].initialised = True, launch.init_value is not None
    counters = compiled.kernel.run(
        buffers,
        launch.grid,
        launch.threadgroup,
        budget=report.budget,
        flush_subnormals=report.flush_subnormals,
        tensor_layout=report.tensor_layout,
    )
    assert counters is not None
    report.launches.append((launch.program.name, counters))
    return made
