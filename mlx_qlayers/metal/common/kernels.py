"""Declarations of kernels: with arrays of any size, of any strides, and without some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import mlx.core as mx

from ...runtime.kernel import Kernel

# Kernels whose offsets have 64 bits, and those of them that read arrays where they lie.
large_kernel: Callable[..., Kernel] = partial(Kernel, large=True)
strided_kernel: Callable[..., Kernel] = partial(large_kernel, ensure_row_contiguous=False)


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
