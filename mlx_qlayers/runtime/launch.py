"""One checked launch of a kernel, as a backend receives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, Required, TypedDict

import mlx.core as mx

from .explain import Row, collectors, count, row
from .generated_source import generate
from .program import Program
from .spec import Spec

Size = tuple[int, int, int]
TemplateValue = bool | int | mx.Dtype
# A launch bound to a backend: arrays in, arrays out.
Bound = Callable[[list[mx.array]], list[mx.array]]


def taking(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes what is at some places, without a Python frame."""
    if len(places) == 1:  # of a single place it would be no sequence
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)


class Launching:
    """A launch with the operation's arrays at ``places``, and ``more`` behind them."""

    __slots__ = ("launch", "more", "places", "taken")

    def __init__(self, launch: Bound, places: Iterable[int], more: Sequence[mx.array] = ()) -> None:
        self.launch, self.places, self.more = launch, (*places,), (*more,)
        self.taken = taking(self.places)

    def __call__(self, *arrays: Any) -> list[mx.array]:
        """Launch it with the operation's arrays."""
        return self.launch([*self.taken(arrays), *self.more])


class LaunchOptions(TypedDict, total=False):
    """How a kernel is launched.

    Attributes:
        grid: the number of threads in x, y and z.
        threadgroup: the threads of one threadgroup in x, y and z.
        output_shapes: one shape for each output.
        template: a value for each template parameter.
        output_dtypes: one dtype for each output; by default what the function declares.
        init_value: fill the outputs with this first. Without it they hold anything.
    """

    grid: Required[Size]
    threadgroup: Required[Size]
    output_shapes: Required[Sequence[Sequence[int]]]
    template: Mapping[str, TemplateValue] | None
    output_dtypes: Sequence[mx.Dtype] | None
    init_value: float | None


@dataclass(frozen=True, eq=False)
class Launch:
    """All that a launch needs but for its arrays; ``runtime/README.md`` lists what is promised.

    Attributes:
        program: the kernel's text and parameters, the same object for all launches of it.
        inputs: shapes and dtypes of the inputs, in the order of ``program.input_names``.
        template: names and values in declared order, as MLX takes them.
        grid: the number of threads in x, y and z.
        threadgroup: the threads of one threadgroup in x, y and z.
        output_shapes: one shape for each output.
        output_dtypes: one dtype for each output.
        init_value: what outputs are filled with first, or None to leave them unset.
    """

    program: Program
    inputs: list[Spec]
    template: list[tuple[str, TemplateValue]]
    grid: Size
    threadgroup: Size
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]
    init_value: float | None = None

    def rows(self, backend: str) -> tuple[Row]:
        """The row that a backend counts with each launch, for :func:`~mlx_qlayers.explain`."""
        return (row(f"kernel {self.program.name}", backend, "launched"),)

    @property
    def function(self) -> str:
        """The name of the kernel function in :attr:`text`."""
        return self._generated[0]

    @property
    def text(self) -> str:
        """The Metal source that MLX generates for this launch, without MLX's preamble."""
        return self._generated[1]

    @cached_property
    def _generated(self) -> tuple[str, str]:
        return generate(self.program, self.inputs, self.template, self.output_dtypes)


def added_to_graph(
    launch: Launch,
    backend: str,
    kernel_of: Callable[[Callable[..., Any]], Callable[..., list[mx.array]]],
    bind: Callable[[Launch], Bound],
    inputs_of: Bound | None,
    **options: Any,
) -> Bound:
    """Add a launch to MLX's graph, by ``mx.fast.metal_kernel`` or ``mx.fast.cuda_kernel``.

    ``kernel_of`` takes that function and gives the kernel; ``bind`` is called again if somebody has
    replaced the function.
    """
    name = f"{backend}_kernel"
    make, rows = getattr(mx.fast, name), launch.rows(backend)
    ticks = rows[0].ticks
    add = partial(
        kernel_of(make),
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
        init_value=launch.init_value,
        **options,
    )

    def run(inputs: list[mx.array]) -> list[mx.array]:
        if getattr(mx.fast, name) is not make:  # whoever replaces it sees every launch
            return bind(launch)(inputs)
        if collectors:
            count(rows)
        else:
            next(ticks)
        return add(inputs=inputs if inputs_of is None else inputs_of(inputs))

    return run
