"""Checks that several operations make; each raises a ``ValueError`` that names the argument."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..formats import Format

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def check_floats(name: str, array: Any) -> None:
    """Raise unless it is an array, or the spec of one, in a dtype that kernels take."""
    dtype = getattr(array, "dtype", None)
    if not isinstance(dtype, mx.Dtype):
        kind = "" if dtype is None else f" of {dtype!r}"
        raise ValueError(f"{name} must be an mx.array, not {type(array).__name__}{kind}")
    if dtype not in FLOATS:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, not {dtype}")


def check_packed(x: Any, w: Any, scales: Any, biases: Any, transpose: bool, fmt: Format) -> None:
    """Raise unless rows of ``x`` can be multiplied with what ``w`` packs."""
    if problem := fmt.mismatch(w, scales, biases):
        raise ValueError(problem)
    inner = fmt.dims(w) if transpose else w.shape[-2]
    if x.shape[-1] != inner:
        raise ValueError(
            f"x of shape {x.shape} must have {inner} columns to go with w of shape {w.shape} "
            f"(transpose={transpose}, group_size={fmt.group_size}, bits={fmt.bits})"
        )
