"""One launch of one of this package's kernels: bind its arrays, run, hand back its outputs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from . import memory
from .handover import Outputs
from .kernel import DEFAULT_BUDGET, Counters, HostKernel, compile_source
from .lint import refuse

if TYPE_CHECKING:
    from ..launch import Launch

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
        >>> with use_backend("host"), checks() as report:
        ...     y = exp(x)
        >>> report.total("bytes_read")
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
    """A kernel compiled for one set of types, and where its buffers come from."""

    kernel: HostKernel
    bind: list[_Maker | None]
    outputs: list[int]


_plans: dict[tuple[Any, ...], _Plan] = {}
_Maker = Callable[[list[mx.array], Outputs], Any]


def _input(i: int) -> _Maker:
    return lambda inputs, _: inputs[i]


def _output(i: int) -> _Maker:
    return lambda _, outputs: outputs.memory(i)


def _shape(i: int) -> _Maker:
    return lambda inputs, _: (ctypes.c_int * max(1, inputs[i].ndim))(*inputs[i].shape)


def _strides(i: int) -> _Maker:
    return lambda inputs, _: (ctypes.c_int64 * max(1, inputs[i].ndim))(*memory.strides(inputs[i]))


def _ndim(i: int) -> _Maker:
    return lambda inputs, _: ctypes.c_int(inputs[i].ndim)


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
    makers: dict[str, _Maker] = {}
    for i, name in enumerate(program.input_names):
        makers[name + "_shape"], makers[name + "_strides"] = _shape(i), _strides(i)
        makers[name + "_ndim"] = _ndim(i)
    for i, name in enumerate(program.input_names):
        makers[name] = _input(i)
    for i, name in enumerate(program.output_names):
        makers[name] = _output(i)
    buffers = kernel.signature.buffers
    bind = [makers[buffers[i].name] if i in buffers else None for i in range(max(buffers) + 1)]
    outputs = [i for i, p in buffers.items() if p.name in program.output_names]
    return _Plan(kernel, bind, outputs)


def _plan(launch: Launch, checked: bool) -> _Plan:
    key = (launch.program, launch.function, checked)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make_plan(launch, checked)
    return plan


def launch(launch: Launch) -> list[mx.array]:
    """Run one checked call and return its outputs, one for each of ``launch.output_shapes``.

    The inputs are read where they lie and the outputs are written where MLX will read them; only
    an input that must be row-contiguous and is not gets copied.
    """
    report = _report
    plan = _plan(launch, report is not None)
    inputs = launch.inputs
    if launch.program.ensure_row_contiguous:
        inputs = [memory.contiguous(x) for x in inputs]
    outputs = Outputs(launch.output_shapes, launch.output_dtypes, launch.init_value)
    bound = [make(inputs, outputs) if make else None for make in plan.bind]
    if report is None:
        raw = plan.kernel.raw(launch.grid, launch.threadgroup)
        addresses = (ctypes.c_uint64 * len(bound))(*map(memory.locate, bound))
        plan.kernel.call(raw, addresses)
        return outputs.arrays()
    fresh = plan.outputs if launch.init_value is None else []
    buffers = {i: memory.extent(x) for i, x in enumerate(bound) if x is not None}
    for i in plan.outputs:
        buffers[i].writable, buffers[i].initialised = True, i not in fresh
    counters = plan.kernel.run(buffers, launch.grid, launch.threadgroup, budget=report.budget)
    assert counters is not None
    report.launches.append((launch.program.name, counters))
    return outputs.arrays()
