"""Declarations of kernels: with arrays of any size, of any strides, and without some of them.

And launches of groups of lanes: threads that share a part of the work, such as a point or a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import e, log2
from struct import pack, unpack

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.spec import Spec

# Kernels whose offsets have 64 bits, and those of them that read arrays where they lie.
large_kernel: Callable[..., Kernel] = partial(Kernel, large=True)
strided_kernel: Callable[..., Kernel] = partial(large_kernel, ensure_row_contiguous=False)


LOG2E = log2(e)


def words(*numbers: float) -> tuple[int, ...]:
    """The bits of floats, as integers: arrays and templates that hold integers hold them so."""
    return unpack(f"{len(numbers)}i", pack(f"{len(numbers)}f", *numbers))


def constants(numbers: Sequence[float], dtype: mx.Dtype = mx.int32) -> mx.array:
    """Numbers for a launch, as an array of at least 12 bytes.

    MLX keeps those of up to 8 in the host's memory, from which a GPU of NVIDIA takes microseconds.
    """
    return mx.array([*numbers, *[0] * (3 - len(numbers))], dtype)


def numbered(names: Iterable[str], omitted: tuple[str, ...]) -> str:
    """The suffix of a kernel's name: which of these parts it omits."""
    letters = "".join("01"[name in omitted] for name in names)
    return f"_{int(letters, 2):x}"


@lru_cache(maxsize=512)
def without(kernel: Kernel, omitted: tuple[str, ...], name: str = "") -> Kernel:
    """A kernel whose ``omitted`` arrays are null pointers: each array costs time in a launch."""
    if not name:
        program = kernel.program
        name = kernel.name + numbered(program.input_names + program.output_names[1:], omitted)
    return replace(kernel, name=name, function=kernel.function or kernel.name, omitted=omitted)


def of_kernel(kernel: Kernel, values: Mapping[str, TemplateValue]) -> dict[str, TemplateValue]:
    """Those of some values that are parameters of a kernel's template."""
    return {name: values[name] for name, _ in kernel.program.template}


# Threads along x before they go on along y.
_ROW = 2**30


def lanes_for(parts: int) -> int:
    """The lanes for so many parts: the power of two that covers them, at most a SIMD group."""
    return min(32, 1 << max(0, parts - 1).bit_length())


def bind_groups(
    kernel: Kernel,
    specs: Sequence[Spec],
    constants: Sequence[mx.array],
    values: Mapping[str, TemplateValue],
    output_shapes: Sequence[tuple[int, ...]],
    *,
    count: int,
    lanes: int,
    threads: int,
    init_value: float | None = None,
) -> Callable[..., list[mx.array]]:
    """Binds ``count`` groups of ``lanes`` threads: whole threadgroups, in rows.

    ``constants`` are the inputs behind ``specs``; ``values`` may hold other kernels' parameters.
    """
    width = min(_ROW, -(-count * lanes // threads) * threads)
    launch = kernel.bind(
        [*specs, *map(Spec.of, constants)],
        template=of_kernel(kernel, {**values, "LANES": lanes}),
        grid=(width, -(-count * lanes // width), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=output_shapes,
        init_value=init_value,
    )
    return lambda *arrays: launch([*arrays, *constants])
