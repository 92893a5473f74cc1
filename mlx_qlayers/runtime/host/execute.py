"""Launches of this package's kernels: bind them, fill in addresses, run, return the outputs."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, cast

import mlx.core as mx

from ..backend import BackendError
from ..launch import Bound, Launch
from ..program import Program
from . import memory
from .executable import DEFAULT_BUDGET, Counters, HostKernel, compile_source
from .lint import refuse
from .output_buffers import Outputs, Scratch, finished

_PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n#line 1 "source.metal"\n'
_ENVIRONMENT = "MLX_QLAYERS_HOST_CHECKS"


@dataclass
class Report:
    """What the checked launches of a ``with checks()`` block did.

    Attributes:
        launches: the kernel's name and its counters, in order.
        budget: the loop turns that each launch may take.
    """

    budget: int = DEFAULT_BUDGET
    launches: list[tuple[str, Counters]] = field(default_factory=list)

    def total(self, name: str, kernel: str | None = None) -> int:
        """The sum of one counter over all launches, or over those of one kernel."""
        return sum(getattr(c, name) for k, c in self.launches if kernel in (None, k))


_report: Report | None = Report() if os.environ.get(_ENVIRONMENT, "0") not in ("", "0") else None


@contextmanager
def checks(enabled: bool = True, *, budget: int = DEFAULT_BUDGET) -> Iterator[Report]:
    """Run the launches of a ``with`` block on the checked build (or, with False, on the fast one).

    ``MLX_QLAYERS_HOST_CHECKS=1`` turns the checks on everywhere.

    Args:
        enabled: whether to check.
        budget: the loop turns after which a launch counts as hanging.

    Raises:
        KernelFault: in the block, at the launch that did something wrong.

    Example:
        >>> from mlx_qlayers.ops.exp import exp
        >>> with use_backend("host"), checks() as report:
        ...     y = exp(mx.ones(16))
        >>> report.total("bytes_read")
        64
    """
    global _report
    before, report = _report, Report(budget)
    _report = report if enabled else None
    try:
        yield report
    finally:
        _report = before


@dataclass
class _Plan:
    """A kernel compiled for one set of types, and where its buffers come from.

    Attributes:
        kernel: the kernel.
        inputs: a buffer's index and an input's, for each input.
        facts: a buffer's index and what makes a shape, the strides or a rank, for each of those.
        outputs: a buffer's index and an output's, for each output.
    """

    kernel: HostKernel
    inputs: list[tuple[int, int]] = field(default_factory=list)
    facts: list[tuple[int, Callable[[list[mx.array]], Any]]] = field(default_factory=list)
    outputs: list[tuple[int, int]] = field(default_factory=list)


def _shape(i: int, inputs: list[mx.array]) -> Any:
    return (ctypes.c_int * max(1, inputs[i].ndim))(*inputs[i].shape)


def _strides(i: int, inputs: list[mx.array]) -> Any:
    x: Any = inputs[i]
    # In elements; by a method of int, since a launch's cost is its calls of Python functions.
    steps = map(x.itemsize.__rfloordiv__, memoryview(x).strides or ())
    return (ctypes.c_int64 * max(1, x.ndim))(*steps)


def _ndim(i: int, inputs: list[mx.array]) -> Any:
    return ctypes.c_int(inputs[i].ndim)


def _plan(launch: Launch, checked: bool) -> _Plan:
    return _compiled(launch.program, launch.function, launch.text, checked)


@lru_cache(maxsize=1024)
def _compiled(program: Program, function: str, text: str, checked: bool) -> _Plan:
    def first() -> None:
        refuse(text, program.name)
        print(f"mlx-qlayers: compiling kernel {program.name} for this CPU, once", file=sys.stderr)

    kernel = compile_source(
        _PREAMBLE + text,
        function,
        checked=checked,
        name=program.name,
        first=first,
    )
    plan = _Plan(kernel)
    at = {parameter.name: i for i, parameter in kernel.signature.buffers.items()}
    for i, name in enumerate(program.input_names):
        plan.inputs.append((at[name], i))
        for suffix, make in (("_shape", _shape), ("_strides", _strides), ("_ndim", _ndim)):
            if name + suffix in at:
                plan.facts.append((at[name + suffix], partial(make, i)))
    plan.outputs = [(at[name], i) for i, name in enumerate(program.output_names)]
    return plan


class _Frame:
    """What a launch fills in, used again by the next one that differs in its arrays alone.

    Attributes:
        addresses: of the buffers, as the kernel's entry point takes them.
        raw: the launch as the runtime library takes it, and its address.
        outputs: where the outputs come from.
        large: the buffer's index and the number of each output that is made for every launch.
    """

    def __init__(self, plan: _Plan, launch: Launch) -> None:
        self.outputs = Outputs(launch.output_shapes, launch.output_dtypes, launch.init_value)
        self.addresses = (ctypes.c_uint64 * plan.kernel.slots)()
        self.raw = plan.kernel.raw(launch.grid, launch.threadgroup)
        self.raw.buffers = ctypes.addressof(self.addresses)
        self.raw_address = ctypes.addressof(self.raw)
        small = self.outputs.small
        self.large = [(slot, i) for slot, i in plan.outputs if i not in small]
        for slot, i in plan.outputs:
            if i in small:
                self.addresses[slot] = small[i].address


def bind(launch: Launch) -> Bound:
    """What runs a launch and returns its outputs, one for each of ``launch.output_shapes``.

    The inputs are read where they lie and the outputs are written where MLX will read them; only
    an input that must be row-contiguous and is not gets copied.
    """
    frames: list[_Frame] = []  # each serves one thread at a time
    contiguous = launch.program.ensure_row_contiguous
    view, address_of, evaluate = memory.view, ctypes.addressof, mx.eval
    plan: _Plan | None = None

    # Every launch of a kernel on a CPU comes through here: calls of Python functions are its cost.
    def run(inputs: list[mx.array]) -> list[mx.array]:
        nonlocal plan
        try:
            evaluate(*inputs)
        except ValueError as error:
            raise _no_values(launch, error) from error
        if _report is not None:
            return _run_checked(launch, inputs, _report)
        if plan is None:
            plan = _plan(launch, False)
        try:
            frame = frames.pop()
        except IndexError:
            frame = _Frame(plan, launch)
        addresses, kept = frame.addresses, []
        for slot, i in plan.inputs:
            try:
                owner = view(inputs[i])
                addresses[slot] = address_of(owner)
            except (TypeError, ValueError):
                inputs[i] = owner = memory.readable(inputs[i], contiguous)
                addresses[slot] = memory.locate(owner)
            kept.append(owner)
        for slot, make in plan.facts:
            owner = make(inputs)
            addresses[slot] = address_of(owner)
            kept.append(owner)
        made = frame.outputs.prepare() if frame.large else frame.outputs.reused
        for slot, i in frame.large:
            addresses[slot] = memory.locate(cast(mx.array, made[i]))
        if plan.kernel.launch(frame.raw_address):
            plan.kernel.fail(frame.raw)
        outputs = finished(made) if frame.large else list(map(mx.array, made))
        frames.append(frame)
        return outputs

    return run


def _no_values(launch: Launch, error: ValueError) -> Exception:
    if "transformations" not in str(error):
        return error
    return BackendError(
        f"kernel {launch.program.name}: mx.compile or mx.vmap is tracing the inputs, and the host "
        "backend needs their values. Leave the call out of the compiled function, or "
        'use_backend("ops")'
    )


def _run_checked(launch: Launch, inputs: list[mx.array], report: Report) -> list[mx.array]:
    plan = _plan(launch, True)
    contiguous = launch.program.ensure_row_contiguous
    inputs = [memory.readable(x, contiguous) for x in inputs]
    made = Outputs(launch.output_shapes, launch.output_dtypes, launch.init_value).prepare()
    buffers = {slot: memory.extent(inputs[i]) for slot, i in plan.inputs}
    buffers |= {slot: memory.extent(make(inputs)) for slot, make in plan.facts}
    for slot, i in plan.outputs:
        x = made[i]
        buffers[slot] = memory.extent(x.memory if isinstance(x, Scratch) else x)
        buffers[slot].writable, buffers[slot].initialised = True, launch.init_value is not None
    counters = plan.kernel.run(buffers, launch.grid, launch.threadgroup, budget=report.budget)
    assert counters is not None
    report.launches.append((launch.program.name, counters))
    return finished(made)
