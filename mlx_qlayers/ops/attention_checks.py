"""What :func:`mlx_qlayers.attention` takes, and what it says of anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..options import AttentionCall, Rotation, Scores, packing
from .checks import FLOATS, check_floats

_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_LARGEST = mx.finfo(mx.float32).max
_PACKED = 3  # packed, scales, biases


def checked(
    arrays: Sequence[Any],
    counts: tuple[int, int],
    scale: Any,
    mask: Any,
    window: Any,
    softcap: Any,
    deterministic: Any = False,
) -> AttentionCall:
    """Check the arguments of a call.

    Args:
        arrays: q, k, v, the mask if it is an array, and sinks, as specs.
        counts: of how many arrays k and v are tuples; 0 for what is no tuple.
        scale, mask, window, softcap, deterministic: see :func:`mlx_qlayers.attention`; ``mask`` if
            it is no array.

    Raises:
        ValueError: something does not fit; it is named.
    """
    q, *parts, of_mask, sinks = arrays
    k, v = tuple(parts[: counts[0] or 1]), tuple(parts[counts[0] or 1 :])
    check_floats("q", q)
    if q.ndim != 4:
        raise ValueError(f"q must be (B, H, L, D), but its shape is {q.shape}")
    batch, heads, queries, width = q.shape
    if any(counts):
        if not all(counts):
            kinds = ["tuple" if count else "array" for count in counts]
            raise ValueError(f"k and v must both be packed or not, not {' and '.join(kinds)}")
        check_packed("k", k, width)
        check_packed("v", v, None, packing(k, width))
        k_shape, v_shape = (*k[0].shape[:3], width), v[0].shape
    else:
        for name, array in (("k", k[0]), ("v", v[0])):
            check_floats(name, array)
            if array.ndim != 4:
                raise ValueError(f"{name} must be (B, Hkv, S, D), but its shape is {array.shape}")
        k_shape, v_shape = k[0].shape, v[0].shape
    if not width:
        raise ValueError(f"q must have at least one column, but its shape is {q.shape}")
    if k_shape[0] != batch or k_shape[3] != width:
        raise ValueError(f"k must be ({batch}, Hkv, S, {width}) for q {q.shape}, not {k_shape}")
    if k_shape[1] == 0 or heads % k_shape[1]:
        raise ValueError(f"k must have a number of heads that divides {heads}, not {k_shape[1]}")
    if k_shape[2] == 0:
        raise ValueError(f"k must have at least one key, but its shape is {k_shape}")
    if v_shape[:3] != k_shape[:3]:
        raise ValueError(f"v must be {k_shape[:3]} and its width, as k, not {v_shape}")
    _check_mask((batch, heads, queries, k_shape[2]), of_mask, mask)
    _check_numbers(scale, window, softcap)
    if sinks is not None:
        check_floats("sinks", sinks)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must be ({heads},), one a head, not {sinks.shape}")
    # A window wider than all keys hides none; kernels and operators count it in 32 bits.
    window = window and min(window, k_shape[2])
    cap = softcap and float(softcap)
    scores = Scores(float(scale), mask is not None, window, cap, bool(deterministic))
    return AttentionCall(q, k, v, scores, of_mask, sinks)


def _is_packed(parts: Sequence[Any]) -> bool:
    return (
        len(parts) == _PACKED
        and all(isinstance(getattr(a, "dtype", None), mx.Dtype) and a.ndim == 4 for a in parts)
        and parts[0].dtype == mx.uint32
        and parts[1].shape == parts[2].shape
        and parts[1].shape[:3] == parts[0].shape[:3]
    )


def check_packed(
    name: str, parts: Sequence[Any], width: int | None, wanted: tuple[int, int] | None = None
) -> None:
    """Raise a ``ValueError`` for what is not packed, in rows of ``width`` or as ``wanted``."""
    if not _is_packed(parts):
        raise ValueError(f"{name} must be (packed, scales, biases) of 4 axes as mx.quantize gives")
    check_floats(f"the scales of {name}", parts[1])
    check_floats(f"the biases of {name}", parts[2])
    words, groups = parts[0].shape[-1], parts[1].shape[-1]
    if width is None:
        assert wanted is not None
        width = 32 * words // wanted[1]
    group_size, bits = width // max(groups, 1), 32 * words // max(width, 1)
    whole = group_size * groups == width and bits * width == 32 * words
    if not whole or bits not in _BITS or group_size not in _GROUP_SIZES:
        raise ValueError(
            f"{name} must hold rows of {width} numbers, not {words} words in {groups} groups"
        )
    if wanted is not None and (group_size, bits) != wanted:
        raise ValueError(
            f"{name} must be packed like k, in groups of {wanted[0]}, not {group_size}"
        )


def _check_mask(full: tuple[int, ...], array: Any, other: Any) -> None:
    if array is not None:
        if array.dtype != mx.bool_ and array.dtype not in FLOATS:
            raise ValueError(f"mask must be booleans or floating-point numbers, not {array.dtype}")
        fits = zip(array.shape[::-1], full[::-1], strict=False)
        if array.ndim > 4 or not all(n in (1, most) for n, most in fits):
            raise ValueError(f"mask must broadcast to {full}, but its shape is {array.shape}")
    elif other is not None and other != "causal":
        raise ValueError(f"mask must be None, 'causal' or an mx.array, not {other!r}")


def check_number(name: str, number: object) -> None:
    """Raise a ``ValueError`` for what is no number, or more than float32 holds."""
    if not is_finite(number):
        raise ValueError(f"{name} must be a finite number, not {number!r}")


def check_rotation(rotation: Any, freqs: Any, width: int) -> None:
    """Raise a ``ValueError`` for a :class:`Rotation` that does not fit heads of ``width``."""
    if not isinstance(rotation, Rotation):
        raise ValueError(f"rotation must be a Rotation, not {rotation!r}")
    dims, traditional, base, scale = rotation
    if type(dims) is not int or dims % 2 or not 0 <= dims <= width:
        raise ValueError(f"dims must be even and at most {width}, not {dims!r}")
    if not isinstance(traditional, bool):
        raise ValueError(f"traditional must be True or False, not {traditional!r}")
    if dims and (base is None) == (freqs is None):
        raise ValueError("one of base and freqs must be given")
    if base is not None and not (is_finite(base) and base > 0):
        raise ValueError(f"base must be a positive number or None, not {base!r}")
    check_number("scale", scale)
    if freqs is not None and freqs.shape != (dims // 2,):
        raise ValueError(f"freqs must have shape ({dims // 2},), not {freqs.shape}")


def is_finite(value: object) -> bool:
    """Whether a value is a number that float32 holds."""
    return isinstance(value, (int, float)) and abs(value) <= _LARGEST


def _check_numbers(scale: object, window: object, softcap: object) -> None:
    check_number("scale", scale)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be a positive integer or None, not {window!r}")
    if softcap is not None and not (is_finite(softcap) and softcap > 0):  # type: ignore[operator]
        raise ValueError(f"softcap must be a positive number or None, not {softcap!r}")
