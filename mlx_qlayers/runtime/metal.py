"""Runs a launch on an Apple GPU, through ``mx.fast.metal_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from .launch import Launch
from .program import Program
from .signature import CONSTANT_BELOW


def launch(launch: Launch) -> list[mx.array]:
    """Add one launch to MLX's graph; MLX compiles the kernel when it first evaluates it."""
    inputs, memo = launch.inputs, launch.memo
    if "metal" not in memo:
        memo["metal"] = _short(launch)
    if short := memo["metal"]:
        inputs = [_padded(x) if i in short else x for i, x in enumerate(inputs)]
    # Looked up at every call, so that a test can put something else in its place.
    kernel = _kernel(mx.fast.metal_kernel, launch.program)
    return kernel(
        inputs=inputs,
        template=launch.template,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
        init_value=launch.init_value,
    )


def _short(launch: Launch) -> list[int]:
    """Which inputs MLX would pass in another address space than is declared."""
    pairs = enumerate(zip(launch.inputs, launch.program.inputs, strict=True))
    return [i for i, (x, p) in pairs if p.padded and x.size < CONSTANT_BELOW]


def _padded(x: mx.array) -> mx.array:
    return mx.concatenate([x.reshape(-1), mx.zeros((CONSTANT_BELOW - x.size,), x.dtype)])


@cache
def _kernel(make: Callable[..., Any], program: Program) -> Callable[..., list[mx.array]]:
    return make(
        name=program.name,
        input_names=program.input_names,
        output_names=program.output_names,
        source=program.source,
        header=program.header,
        ensure_row_contiguous=program.ensure_row_contiguous,
        atomic_outputs=program.atomic_outputs,
    )
