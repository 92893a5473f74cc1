"""Launches the gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import mlx.core as mx

from ...runtime.devices import device_of
from ...runtime.launch import Launching
from ...runtime.spec import Spec
from ..common.kernels import large_kernel, without, words

# Elements of a row of the state that a lane has, and lanes of a row.
_EACH, _LANES = 16, (1, 2, 4, 8, 16, 32)
_THREADS = 64


def takes(width: int) -> bool:
    """Whether SIMD groups hold rows of states of so many key columns."""
    return width % _EACH == 0 and width // _EACH in _LANES


_MASKED = large_kernel(
    "gated_delta_masked",
    "gated_delta/gated_delta.metal",
    function="gated_delta",
    registers=lambda T, columns, each, ahead, **_: (
        4 * each + ahead * each * (T.size // 2 + columns)
    ),
)
_KERNEL = without(_MASKED, ("mask",), "gated_delta")


def gated_delta(arrays: Sequence[Any], *norms: float) -> Callable[..., list[mx.array]]:
    """Binds the gated delta rule; the launch gives y and the state."""
    q, _, v, g, beta, state, mask = arrays
    (_, length, key_heads, width), (*_, heads, values) = q.shape, v.shape
    lanes, rows = width // _EACH, prod(state.shape[:-1])
    factors = words(*(norms or (0, 1, 1)))
    sizes = mx.array([length, key_heads, heads, values, rows, *factors], mx.int32)
    launch = (_KERNEL if mask is None else _MASKED).bind(
        [*(a for a in arrays if a is not None), Spec.of(sizes)],
        template={
            "T": q.dtype,
            "G": g.dtype,
            "B": beta.dtype,
            "columns": g.ndim == 4,
            "normed": len(norms) > 0,
            "lanes": lanes,
            "each": _EACH,
            # Tokens that are read ahead.
            "ahead": 1 if device_of().few_registers else 2,
        },
        grid=(-(-rows * lanes // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[v.shape, state.shape],
    )
    return Launching(launch, [i for i, a in enumerate(arrays) if a is not None], [sizes])
