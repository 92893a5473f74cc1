"""Runs launches on an Apple GPU, through ``mx.fast.metal_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from .devices import device_of
from .launch import Bound, Launch, added_to_graph
from .program import CONSTANT_BELOW, Program

_PRODUCTS = "#define BFLOAT_PRODUCTS "


def bind(launch: Launch) -> Bound:
    """A function that adds a launch to MLX's graph."""
    pairs = zip(launch.inputs, launch.program.inputs, strict=True)
    # MLX would pass these in another address space than is declared.
    short = {i for i, (x, p) in enumerate(pairs) if p.padded and x.size < CONSTANT_BELOW}

    def padded(inputs: list[mx.array]) -> list[mx.array]:
        return [_padded(x) if i in short else x for i, x in enumerate(inputs)]

    kernel = partial(_kernel, program=launch.program)
    options = {"grid": launch.grid, "template": launch.template}
    return added_to_graph(launch, "metal", kernel, bind, padded if short else None, **options)


def _padded(x: mx.array) -> mx.array:
    return mx.concatenate([x.reshape(-1), mx.zeros((CONSTANT_BELOW - x.size,), x.dtype)])


def widened(text: str) -> str:
    """The text of a kernel whose matrix products take parts of bfloat as float."""
    return text.replace(f"{_PRODUCTS}bfloat\n", f"{_PRODUCTS}float\n")


@lru_cache(maxsize=512)
def _kernel(make: Callable[..., Any], program: Program) -> Callable[..., list[mx.array]]:
    # The GPUs of few registers are those without bfloat: see common/fragment.metal.
    header = widened(program.header) if device_of("metal").few_registers else program.header
    return make(
        name=program.name,
        input_names=program.input_names,
        output_names=program.output_names,
        source=program.source,
        header=header,
        ensure_row_contiguous=program.ensure_row_contiguous,
        atomic_outputs=program.atomic_outputs,
    )
