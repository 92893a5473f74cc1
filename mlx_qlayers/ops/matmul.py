"""Products of dense matrices, where MLX's own are not exact enough or refuse a view."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

import mlx.core as mx

from ..dispatch import Choice, Gradient, Operation, Plan, choose, dispatch
from ..measurements.thresholds import gain
from ..metal.linalg import launch
from ..runtime import tensor_ops
from ..runtime.devices import device_of
from ..runtime.spec import Spec


def matmul(a: mx.array, b: mx.array, *, allow_tf32: bool = False) -> mx.array:
    """A B, in float32 never rounded to TF32 unless that is allowed.

    MLX rounds float32 to TF32 on NVIDIA GPUs and on the matrix units of an M5, and hands cuBLAS
    operands that do not begin at 16 bytes, as views may not, which it refuses.

    Args:
        a: (..., M, K) float32, float16 or bfloat16; on NVIDIA GPUs no view into the
            middle of a buffer.
        b: (..., K, N) in the dtype of ``a``, with the same leading axes.
        allow_tf32: leave float32 to MLX's product, whatever that rounds it to.

    Returns:
        (..., M, N) in the dtype of ``a``. It can be differentiated once.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        >>> matmul(mx.ones((2, 3)), mx.eye(3)).tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]

    Source: ``mx.matmul``.
    """
    return dispatch(_MATMUL, (a, b), (allow_tf32,))


def _plan(arrays: Sequence[Spec], allow_tf32: bool) -> Plan:
    a, b = arrays
    (*lead, m, k), (*others, depth, n) = a.shape, b.shape
    if a.dtype != b.dtype or lead != others or k != depth:
        raise ValueError(f"a {a.shape} {a.dtype} and b {b.shape} {b.dtype} do not fit")
    if allow_tf32:
        choice = Choice("matmul", "reference", "TF32 is allowed")
    elif a.dtype != mx.float32 or not (a.size and b.size):
        why = "the kernel is for float32 matrices that are not empty"
        choice = Choice("matmul", "reference", why)
    else:
        faster = gain("linalg_gain", m, "subtract_product")
        choice = choose("matmul", reason=_why_exact(), host_gain=faster)
    suits = allow_tf32 or a.dtype != mx.float32 or _why_exact() is not None

    def stock(a: mx.array, b: mx.array) -> mx.array:
        # A CPU rounds float32 to nothing less.
        return a @ _aligned(b) if suits else mx.matmul(a, b, stream=mx.cpu)

    def gradient(given: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        dy = _aligned(cotangents[0])
        a, b = (each.swapaxes(-1, -2) for each in given)
        return [matmul(dy, b, allow_tf32=allow_tf32), matmul(a, dy, allow_tf32=allow_tf32)]

    run = stock
    if choice.path != "reference":
        flat = prod(lead)
        launched = launch.product(flat, m, k, n)

        def run(a: mx.array, b: mx.array) -> mx.array:
            # It gives -A B.
            y = launched(a.reshape(flat, m, k), -b.reshape(flat, k, n))
            return y.reshape(*lead, m, n)

    return Plan(choice, run, (Gradient((0, 1), gradient),), stock)


_MATMUL = Operation("matmul", _plan)


def _why_exact() -> str | None:
    """Why MLX's own product is exact in float32 here, if it is."""
    if os.environ.get("MLX_ENABLE_TF32") == "0":
        return "MLX_ENABLE_TF32=0 keeps MLX's product exact"
    if device_of().gpu and not tensor_ops.stock_rounds():
        return "MLX's product is exact on GPUs without matrix units"
    return None


def _aligned(a: mx.array) -> mx.array:
    """The same numbers where a buffer begins: a copy, as nothing tells where it is."""
    return mx.concatenate([a, a[..., :0]], axis=-1) if device_of().stock_needs_alignment else a
