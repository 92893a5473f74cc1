"""Scaled dot-product attention: grouped heads, masks, windows, softcap, sinks, packed keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import mlx.core as mx

from ..dispatch.entries import on_change
from ..metal.attention.forward import Scores
from ..reference import attention as reference
from ..reference.attention import Packed
from ..runtime.backend import requested
from ..runtime.legacy import on_request
from . import attention_decode, attention_tiled
from .attention_stock import alone
from .differentiable import bare_threads, gradients_are_left_out

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_Known = Callable[..., mx.array]
# Calls that were checked, by all that was looked at.
_known: dict[tuple[Any, ...], _Known] = {}
_REMEMBERED = 256
# The last of them that had arrays and no softcap: shapes, dtypes, scale, mask, window, and what
# computes it. The layers of a model ask for the same one, and every step for another.
_NONE: tuple[Any, ...] = (None,) * 10
_last = _NONE


def _forget_last() -> None:
    global _last
    _last = _NONE


def _forget() -> None:
    _known.clear()
    _forget_last()


on_change(_forget)
on_request(_forget_last)


def attention(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """``softmax(q @ k.T * scale) @ v`` for every head, with a float32 softmax.

    Args:
        q: queries (B, H, L, D); float32, float16 or bfloat16.
        k: keys (B, Hkv, S, D), where Hkv divides H and is not expanded; or what
            ``mx.quantize(k)`` gives, (packed, scales, biases), as mlx-lm's ``QuantizedKVCache``
            keeps it: group size and bits follow from the shapes.
        v: values (B, Hkv, S, Dv), or packed with the group size and bits of ``k``.
        scale: what the products of queries and keys are multiplied by.
        mask: ``"causal"`` (the last query is aligned with the last key), booleans (true where a
            query sees a key) or numbers to add to the scores; arrays broadcast to (B, H, L, S).
        window: query i, counted so that the last of both are aligned, sees keys j with
            ``i - window < j <= i``, of those that ``mask`` lets it see.
        softcap: a score s becomes ``softcap * tanh(s / softcap)``, before the mask.
        sinks: (H,) scores of keys without a value, one a head, outside mask and softcap.

    Returns:
        (B, H, L, Dv) in the dtype that those of ``q``, ``k`` and ``v`` promote to. A query that
        sees no key gets the mean of all values (as the stock operator on a CPU), or zero where
        there are sinks; never NaN.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype or value; it says which.

    Example:
        >>> q, k = mx.ones((1, 4, 3, 32)), mx.ones((1, 2, 5, 32))
        >>> attention(q, k, k, scale=32**-0.5, mask="causal").shape
        (1, 4, 3, 32)

    Source:
        ``mx.fast.scaled_dot_product_attention``; windows as in mlx-lm, softcap as in Gemma 2 (arXiv
        2408.00118), sinks as in gpt-oss (arXiv 2508.10925).
    """
    of_q, of_k, of_v, q_dtype, k_dtype, v_dtype, of_scale, of_mask, of_window, known = _last
    keys: Any = k
    values: Any = v
    try:
        # Where stock is called one by one, whatever Python does besides shows.
        again = (
            q.shape == of_q
            and keys.shape == of_k
            and values.shape == of_v
            and q.dtype == q_dtype
            and keys.dtype == k_dtype
            and values.dtype == v_dtype
            and type(scale) is float
            and scale == of_scale
            and mask is of_mask
            and window is of_window
            and softcap is sinks is None
            and not bare_threads
        )
    except (AttributeError, TypeError):
        again = False
    if not again:
        if type(k) is type(v) is list:
            k, v = tuple(k), tuple(v)
        known = _looked_up(q, k, v, mask, sinks, scale, window, softcap)
    out: mx.array = known(q, k, v, None if type(mask) is str else mask, sinks)
    return out


def _looked_up(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> _Known:
    """What computes a call: checked now, or before if there was one like it."""
    global _last
    bare = gradients_are_left_out()
    key: tuple[Any, ...] | None
    # Whatever the checks and the choice look at; types too, since 4.0 equals 4.
    key = scale, type(scale), window, type(window), softcap, type(softcap), requested(), bare
    try:
        key += tuple(map(_kind, (q, k, v, mask, sinks)))
        known = _known.get(key)
    except (TypeError, AttributeError):
        key = known = None
    if known is None:
        scores = Scores(scale, isinstance(mask, str), window, softcap)
        known = _checked(q, k, v, mask, sinks, scores)
        if len(_known) >= _REMEMBERED:
            _known.clear()
        if key is not None:
            _known[key] = known
    _last = _NONE
    plain = softcap is sinks is None and not bare and not isinstance(mask, mx.array)
    if plain and isinstance(k, mx.array) and isinstance(v, mx.array):
        shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
        _last = *shapes, *dtypes, scale, mask, window, known
    return known


def _kind(array: Any) -> Any:
    """What is looked at of an array, or of several in a tuple."""
    if type(array) is tuple:
        return tuple(map(_kind, array))
    return array if array is None or type(array) is str else (array.shape, array.dtype)


def _checked(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    scores: Scores,
) -> Callable[..., mx.array]:
    """Check a call; what then computes it from q, k, v, an array as mask, and sinks."""
    _check_arrays(q, k, v)
    _check_options(q, reference.keys(k), mask, sinks, scores)
    few = attention_decode.covers(q, k, v)
    kernels = attention_decode.Attention if few else attention_tiled.Attention
    operation = kernels(q, k, v, mask, sinks, scores)
    return alone(q, k, v, mask, sinks, scores, operation.unless) or operation


def _check_arrays(q: mx.array, k: mx.array | Packed, v: mx.array | Packed) -> None:
    _check_floats("q", q)
    if q.ndim != 4:
        raise ValueError(f"q must be (B, H, L, D), but its shape is {q.shape}")
    width = q.shape[-1]
    if isinstance(k, tuple) and isinstance(v, tuple):
        _check_packed("k", k, width)
        _check_packed("v", v, None, reference.packing(k, width))
        k_shape, v_shape = (*k[0].shape[:3], width), v[0].shape
    else:
        if isinstance(k, tuple) or isinstance(v, tuple):
            raise ValueError(f"k and v must both be packed or not, not {_name(k)} and {_name(v)}")
        for name, array in (("k", k), ("v", v)):
            _check_floats(name, array)
            if array.ndim != 4:
                raise ValueError(f"{name} must be (B, Hkv, S, D), but its shape is {array.shape}")
        k_shape, v_shape = k.shape, v.shape
    batch, heads = q.shape[:2]
    if k_shape[0] != batch or k_shape[3] != width:
        raise ValueError(f"k must be ({batch}, Hkv, S, {width}) for q {q.shape}, not {k_shape}")
    if k_shape[1] == 0 or heads % k_shape[1]:
        raise ValueError(f"k must have a number of heads that divides {heads}, not {k_shape[1]}")
    if k_shape[2] == 0:
        raise ValueError(f"k must have at least one key, but its shape is {k_shape}")
    if v_shape[:3] != k_shape[:3]:
        raise ValueError(f"v must be {k_shape[:3]} and its width, as k, not {v_shape}")


def _name(array: object) -> str:
    return type(array).__name__


def _check_floats(name: str, array: object) -> None:
    if not isinstance(array, mx.array):
        raise ValueError(f"{name} must be an mx.array, not {_name(array)}")
    if array.dtype not in _FLOATS:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, not {array.dtype}")


def _is_packed(array: object) -> TypeGuard[Packed]:
    return (
        isinstance(array, tuple)
        and len(array) == 3
        and all(isinstance(part, mx.array) and part.ndim == 4 for part in array)
        and array[0].dtype == mx.uint32
        and array[1].shape == array[2].shape
        and array[1].shape[:3] == array[0].shape[:3]
    )


def _check_packed(
    name: str, array: object, width: int | None, wanted: tuple[int, int] | None = None
) -> None:
    if not _is_packed(array):
        raise ValueError(f"{name} must be (packed, scales, biases) of 4 axes as mx.quantize gives")
    _check_floats(f"the scales of {name}", array[1])
    _check_floats(f"the biases of {name}", array[2])
    if width is None:
        assert wanted is not None
        width = 32 * array[0].shape[-1] // wanted[1]
    words, groups = array[0].shape[-1], array[1].shape[-1]
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


def _check_options(
    q: mx.array,
    keys: int,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    scores: Scores,
) -> None:
    batch, heads, queries, _ = q.shape
    scale, window, softcap = scores.scale, scores.window, scores.softcap
    if not isinstance(scale, (int, float)):
        raise ValueError(f"scale must be a number, not {scale!r}")
    if isinstance(mask, mx.array):
        if mask.dtype != mx.bool_ and mask.dtype not in _FLOATS:
            raise ValueError(f"mask must be booleans or floating-point numbers, not {mask.dtype}")
        full = (batch, heads, queries, keys)
        fits = zip(mask.shape[::-1], full[::-1], strict=False)
        if mask.ndim > 4 or not all(n in (1, most) for n, most in fits):
            raise ValueError(f"mask must broadcast to {full}, but its shape is {mask.shape}")
    elif mask is not None and mask != "causal":
        raise ValueError(f"mask must be None, 'causal' or an mx.array, not {mask!r}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be a positive integer or None, not {window!r}")
    if softcap is not None and not (isinstance(softcap, (int, float)) and softcap > 0):
        raise ValueError(f"softcap must be a positive number or None, not {softcap!r}")
    if sinks is not None:
        _check_floats("sinks", sinks)
        if sinks.shape != (heads,):
            raise ValueError(f"sinks must be ({heads},), one a head, not {sinks.shape}")
