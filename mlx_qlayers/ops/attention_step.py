"""A step of decoding whose graph does not depend on how many keys a cache holds, for traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import KERNELS, Operation, Plan, choose, dispatch, gradient_of
from ..dispatch.measurements import configure, threshold
from ..metal.attention import step as kernels
from ..options import Rotation
from ..reference import attention_step as reference
from ..runtime.backend import backend
from .attention_checks import check_rotation, check_scale
from .checks import FLOATS

__all__ = ["MIN_POSITIONS", "Rotation", "attention_step", "why_not"]

_MAX_WIDTH = 256
# Elements of `positions` at least: MLX passes fewer in another address space.
MIN_POSITIONS = 8


def attention_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_buffer: mx.array,
    v_buffer: mx.array,
    positions: mx.array,
    *,
    scale: float,
    rotation: Rotation,
    freqs: mx.array | None = None,
    mask: mx.array | None = None,
) -> list[mx.array]:
    """Rotary embedding, new rows of a cache's buffers and attention, for one token a sequence.

    What depends on the number of keys is an array, so that ``mx.compile`` traces a step of decoding
    once for many, until the buffers have to grow.

    Args:
        q: (B, 1, H * D) in float32, float16 or bfloat16: the product, before its rotation.
        k: (B, 1, Hkv * D) in the dtype of ``q``.
        v: (B, 1, Hkv * Dv).
        k_buffer: (B, Hkv, S, D).
        v_buffer: (B, Hkv, S, Dv).
        positions: (8 or more,) int32: how many keys of the buffers count, from 0 to S - 1; the
            position of each sequence's token; then anything.
        scale: what the products of queries and keys are multiplied by.
        rotation: how queries and keys are turned; ``dims`` 0 turns nothing.
        freqs: (dims / 2,) the reciprocals of what elements turn by, if ``rotation.base`` is None.
        mask: booleans, true where a token sees a key; (B or 1, H or 1, 1, S or more), of which
            column j is that of key j, the token's own key included. None hides nothing.

    Returns:
        (B, 1, H * Dv), the heads side by side; and both buffers with the token's key and value as
        row ``positions[0]``, and zeros behind it.

    Raises:
        ValueError: a shape, a dtype or a number does not fit; it is named.

    Example:
        >>> x, buffer = mx.ones((1, 1, 64)), mx.zeros((1, 2, 256, 32))
        >>> positions = mx.array([7, 7, 0, 0, 0, 0, 0, 0])
        >>> options = {"scale": 1.0, "rotation": Rotation(32)}
        >>> [y.shape for y in attention_step(x, x, x, buffer, buffer, positions, **options)]
        [(1, 1, 64), (1, 2, 256, 32), (1, 2, 256, 32)]

    Source: :func:`mlx_qlayers.ops.rotary.rotary_embedding` and :func:`mlx_qlayers.attention`.
    """
    arrays = q, k, v, k_buffer, v_buffer, positions, freqs, mask
    outputs: list[mx.array] = dispatch(_STEP, arrays, (scale, rotation))
    return outputs


def _plan(arrays: Sequence[Any], scale: float, rotation: Rotation) -> Plan:
    _check(arrays)
    q, _, _, k_buffer, v_buffer, _, freqs, _ = arrays
    check_scale(scale)
    check_rotation(rotation, freqs, k_buffer.shape[3])
    v_width = v_buffer.shape[3]
    choice = choose("attention_step", KERNELS if _covers(k_buffer.shape, v_width, rotation) else ())
    composed = reference.attention_step(arrays, scale, rotation)
    if choice.path == "ops":
        return Plan(choice, composed)
    question = kernels.question(q, k_buffer, v_width)
    config = configure("attention_step", choice.path, *question)
    launch = kernels.attention_step(arrays, scale, rotation, config)
    return Plan(choice, launch, gradient_of(composed, arrays), composed)


_STEP = Operation("attention_step", _plan)


def why_not(k_shape: tuple[int, ...], v_width: int, rotation: Rotation) -> str | None:
    """Why the kernel should not be used on this machine for such buffers, if so.

    Args:
        k_shape: (B, Hkv, S, D).
        v_width: Dv.
        rotation: how queries and keys are turned.
    """
    if not _covers(k_shape, v_width, rotation):
        return "no kernel for these shapes"
    most = threshold("attention_step_max_keys")
    if most is None:
        return f"it was not measured on {backend()}"
    return f"more than {most} keys" if k_shape[2] > most else None


def _covers(k_shape: tuple[int, ...], v_width: int, rotation: Rotation) -> bool:
    width = k_shape[3]
    widths_fit = width % 8 == v_width % 8 == 0 and max(width, v_width) <= _MAX_WIDTH
    return widths_fit and min(*k_shape, v_width) > 0


def _check(arrays: Sequence[Any]) -> None:
    q, k, v, k_buffer, v_buffer, positions, _, mask = arrays
    if q.ndim != 3 or q.shape[1] != 1 or q.dtype not in FLOATS:
        what = f"{q.dtype} {q.shape}"
        raise ValueError(f"q must be (B, 1, H * D) in a floating-point type, not {what}")
    if k_buffer.ndim != 4 or k_buffer.shape[0] != q.shape[0]:
        raise ValueError(f"k_buffer must be ({q.shape[0]}, Hkv, S, D), not {k_buffer.shape}")
    if v_buffer.ndim != 4 or not v_buffer.shape[3]:
        raise ValueError(f"v_buffer must be (B, Hkv, S, Dv), not {v_buffer.shape}")
    batch, kv_heads, size, width = k_buffer.shape
    if 0 in (kv_heads, width, q.shape[2]) or q.shape[2] % (kv_heads * width):
        raise ValueError(f"q must have a multiple of {kv_heads} heads of {width}, not {q.shape}")
    heads, v_width = q.shape[2] // width, v_buffer.shape[-1]
    for name, array, shape in (
        ("v_buffer", v_buffer, (batch, kv_heads, size, v_width)),
        ("k", k, (batch, 1, kv_heads * width)),
        ("v", v, (batch, 1, kv_heads * v_width)),
        ("k_buffer", k_buffer, k_buffer.shape),
    ):
        if array.shape != shape or array.dtype != q.dtype:
            raise ValueError(f"{name} must be {q.dtype} {shape}, not {array.dtype} {array.shape}")
    least, kind = max(MIN_POSITIONS, 1 + batch), positions.dtype
    if positions.ndim != 1 or positions.size < least or kind != mx.int32:
        what = f"{kind} {positions.shape}"
        raise ValueError(f"positions must be int32 and {least} or more, not {what}")
    if mask is None:
        return
    broadcast = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if mask.dtype != mx.bool_ or not broadcast or mask.shape[2] != 1 or mask.shape[3] < size:
        wanted, what = (batch, heads, 1, size), f"{mask.dtype} {mask.shape}"
        raise ValueError(f"mask must be bool {wanted}, not {what}")
