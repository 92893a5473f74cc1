"""What :func:`mlx_qlayers.attention` takes, and what it says of anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..options import AttentionCall, Scores, packing
from .checks import FLOATS, check_floats

_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_PACKED = 3  # packed, scales, biases


def checked(
    arrays: Sequence[Any], counts: tuple[int, int], scale: Any, mask: Any, window: Any, softcap: Any
) -> AttentionCall:
    """Check the arguments of a call.

    Args:
        arrays: q, k, v, the mask if it is an array, and sinks, as specs.
        counts: of how many arrays k and v are tuples; 0 for what is no tuple.
        scale, mask, window, softcap: see :func:`mlx_qlayers.attention`; ``mask`` if it is no array.

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
        _check_packed("k", k, width)
        _check_packed("v", v, None, packing(k, width))
        k_shape, v_shape = (*k[0].shape[:3], width), v[0].shape
    else:
        for name, array in (("k", k[0]), ("v", v[0])):
            check_floats(name, array)
            if array.ndim != 4:
                raise ValueError(f"{name} must be (B, Hkv, S, D), but its shape is {array.shape}")
        k_shape, v_shape = k[0].shape, v[0].shape
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
    scores = Scores(scale, mask is not None, window, softcap)
    return AttentionCall(q, k, v, scores, of_mask, sinks)


def _is_packed(parts: Sequence[Any]) -> bool:
    return (
        len(parts) == _PACKED
        and all(isinstance(getattr(a, "dtype", None), mx.Dtype) and a.ndim == 4 for a in parts)
        and parts[0].dtype == mx.uint32
        and parts[1].shape == parts[2].shape
        and parts[1].shape[:3] == parts[0].shape[:3]
    )


def _check_packed(
    name: str, parts: Sequence[Any], width: int | None, wanted: tuple[int, int] | None = None
) -> None:
    if not _is_packed(parts):
        raise ValueError(f"{name} must be (packed, scales, biases) of 4 axes as mx.quantize gives")
    check_floats(f"the scales of {name}", parts[1])
    check_floats(f"the biases of {name}", parts[2])
    words, groups = parts[0].shape[-1], parts[1].shape[-1]
    if width is None:
        assert wanted is not None
        width = 32 * words // wanted[1]
    group_size, bits = width // max(groups, 1), 32 * words // width
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


def _check_numbers(scale: object, window: object, softcap: object) -> None:
    if not isinstance(scale, (int, float)):
        raise ValueError(f"scale must be a number, not {scale!r}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be a positive integer or None, not {window!r}")
    if softcap is not None and not (isinstance(softcap, (int, float)) and softcap > 0):
        raise ValueError(f"softcap must be a positive number or None, not {softcap!r}")
