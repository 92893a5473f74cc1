"""One launch of one of this package's kernels: bind its arrays, run, hand back its outputs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from . import memory
from .executable import DEFAULT_BUDGET, Counters, HostKernel, compile_source
from .lint import refuse
from .output_buffers import Outputs, Scratch, finished

if TYPE_CHECKING:
    from ..launch import Launch
    from ..program import Program

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
        >>> from mlx_qlayers.metal.exp import exp
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


_plans: dict[tuple[Program, str, bool], _Plan] = {}


def _shape(i: int, inputs: list[mx.array]) -> Any:
    return (ctypes.c_int * max(1, inputs[i].ndim))(*inputs[i].shape)


def _strides(i: int, inputs: list[mx.array]) -> Any:
    return (ctypes.c_int64 * max(1, inputs[i].ndim))(*memory.strides(inputs[i]))


def _ndim(i: int, inputs: list[mx.array]) -> Any:
    return ctypes.c_int(inputs[i].ndim)


def _plan(launch: Launch, checked: bool) -> _Plan:
    key = (launch.program, launch.function, checked)
    if key not in _plans:
        _plans[key] = _make_plan(launch, checked)
    return _plans[key]


def _make_plan(launch: Launch, checked: bool) -> _Plan:
    program = launch.program
    refuse(launch.text, program.name)
    kernel = compile_source(
        _PREAMBLE + launch.text,
        launch.function,
        checked=checked,
        name=program.name,
        note=f"mlx-qlayers: compiling kernel {program.name} for this CPU, once",
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
    """What a launch fills in, used again by the next one that differs in its inputs alone."""

    def __init__(self, launch: Launch) -> None:
        self.plan = _plan(launch, False)
        self.outputs = Outputs(launch.output_shapes, launch.output_dtypes, launch.init_value)
        self.addresses = (ctypes.c_uint64 * self.plan.kernel.slots)()
        self.raw = self.plan.kernel.raw(launch.grid, launch.threadgroup)
        self.raw.buffers = ctypes.addressof(self.addresses)
        small = self.outputs.small
        self.large = [(slot, i) for slot, i in self.plan.outputs if i not in small]
        for slot, i in self.plan.outputs:
            if i in small:
                self.addresses[slot] = small[i].address

    def run(self, launch: Launch) -> list[mx.array]:
        """Launch on these inputs; what lies at the addresses is kept until that is over."""
        addresses, plan, inputs, kept = self.addresses, self.plan, launch.inputs, []
        for slot, i in plan.inputs:
            try:
                owner = memory.view(inputs[i])
                addresses[slot] = ctypes.addressof(owner)
            except (TypeError, ValueError):
                inputs[i] = owner = memory.readable(inputs[i], launch.program.ensure_row_contiguous)
                addresses[slot] = memory.locate(owner)
            kept.append(owner)
        for slot, make in plan.facts:
            owner = make(inputs)
            addresses[slot] = ctypes.addressof(owner)
            kept.append(owner)
        made = self.outputs.prepare()
        for slot, i in self.large:
            addresses[slot] = memory.locate(cast(mx.array, made[i]))
        plan.kernel.start(self.raw)
        return finished(made)


def launch(launch: Launch) -> list[mx.array]:
    """Run one checked call and return its outputs, one for each of ``launch.output_shapes``.

    The inputs are read where they lie and the outputs are written where MLX will read them; only
    an input that must be row-contiguous and is not gets copied.
    """
    if _report is not None:
        return _launch_checked(launch, _report)
    # A frame serves one thread at a time.
    frames = launch.memo.setdefault("host", [])
    frame = frames.pop() if frames else _Frame(launch)
    outputs = frame.run(launch)
    frames.append(frame)
    return outputs


def _launch_checked(launch: Launch, report: Report) -> list[mx.array]:
    plan = _plan(launch, True)
    contiguous = launch.program.ensure_row_contiguous
    inputs = [memory.readable(x, contiguous) for x in launch.inputs]
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
