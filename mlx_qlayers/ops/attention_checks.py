"""Checks the arguments of :func:`mlx_qlayers.attention`, and words its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..options import AttentionCall, Rotation, Scores, packing
from ..runtime.spec import Spec
from .signature import Signature

_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_PACKED = 3  # packed, scales, biases


_QUERIES = Signature("q: float (B, H, L, D); D > 0")
_TAKES = Signature("""
    q: float (B, H, L, D)
    k: float (B, Hkv, S, D); S > 0 and Hkv > 0 and H % Hkv == 0
    v: float (B, Hkv, S, Dv)
    mask: bool|float to (B, H, L, S) or None
    sinks: float (H,) or None
    scale: number
    window: int >= 1 or None
    softcap: number > 0 or None
""")
_ROTATION = Signature("""
    dims: int
    traditional: flag
    base: number > 0 or None
    scale: number
    freqs: any (dims // 2,) or None
""")


def checked(
    arrays: Sequence[Any],
    counts: tuple[int, int],
    scale: Any,
    mask: Any,
    window: Any,
    softcap: Any,
    deterministic: Any = False,
) -> AttentionCall:
    """Check the arguments of a call, with arrays as specs; a ValueError names what does not fit.

    ``counts`` says of how many arrays k and v are tuples; ``mask`` is one that is no array.
    """
    q, *parts, of_mask, sinks = arrays
    k, v = tuple(parts[: counts[0] or 1]), tuple(parts[counts[0] or 1 :])
    width = _QUERIES.check(q)["D"]
    of_k, of_v = k[0], v[0]
    if any(counts):
        if not all(counts):
            kinds = ["tuple" if count else "array" for count in counts]
            raise ValueError(f"k and v must both be packed or not, not {' and '.join(kinds)}")
        check_packed("k", k, width)
        check_packed("v", v, None, packing(k, width))
        of_k, of_v = Spec((*of_k.shape[:3], width), q.dtype), Spec(of_v.shape, q.dtype)
    if mask not in (None, "causal"):
        raise ValueError(f"mask must be None, 'causal' or an mx.array, not {mask!r}")
    found = _TAKES.check(q, of_k, of_v, of_mask, sinks, scale, window, softcap)
    # A window wider than all keys hides none; kernels and operators count it in 32 bits.
    window = window and min(window, found["S"])
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
    Signature(f"the scales of {name}: float\nthe biases of {name}: float").check(*parts[1:])
    words, groups = parts[0].shape[-1], parts[1].shape[-1]
    if width is None:
        assert wanted is not None
        width = groups * wanted[0]
    group_size, bits = width // max(groups, 1), 32 * words // max(width, 1)
    whole = group_size * groups == width and bits * width == 32 * words
    if not whole or bits not in _BITS or group_size not in _GROUP_SIZES:
        raise ValueError(
            f"{name} must hold rows of {width} numbers, not {words} words in {groups} groups"
        )
    if wanted is not None and group_size != wanted[0]:
        raise ValueError(
            f"{name} must be packed like k, in groups of {wanted[0]}, not {group_size}"
        )


def check_rotation(rotation: Any, freqs: Any, width: int) -> None:
    """Raise a ``ValueError`` for a :class:`Rotation` that does not fit heads of ``width``."""
    if not isinstance(rotation, Rotation):
        raise ValueError(f"rotation must be a Rotation, not {rotation!r}")
    dims, _, base, _ = rotation
    if type(dims) is not int or dims % 2 or not 0 <= dims <= width:
        raise ValueError(f"dims must be even and at most {width}, not {dims!r}")
    if dims and (base is None) == (freqs is None):
        raise ValueError("one of base and freqs must be given")
    _ROTATION.check(*rotation, freqs, dims=dims)
