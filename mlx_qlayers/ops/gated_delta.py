"""The gated delta rule of linear attention: checks and the choice of a path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..dispatch import Operation, Plan, choose, dispatch, either
from ..metal.gated_delta import launch as kernels
from ..reference import gated_delta as reference
from ..runtime.backend import requested
from ..runtime.devices import device_of
from .signature import Signature, is_finite


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    norms: tuple[float, float, float] | None = None,
) -> list[mx.array]:
    """Token after token: S = g S, then S += beta (v - S k) k^T, then y = S q, of each head.

    Args:
        q: (B, L, Hk, Dk) in float32, float16 or bfloat16, scaled as scores are to be.
        k: the same, normalized.
        v: (B, L, H, Dv) in the dtype of ``q``; Hk divides H.
        g: (B, L, H), floating point: what a state keeps; or (B, L, H, Dk), that of each column.
        beta: (B, L, H), floating point: how much it learns.
        state: (B, H, Dv, Dk) float32, S ahead of the first token.
        mask: (B, L) booleans: tokens that leave the state as it was where it is False; or None.
        norms: an epsilon, and what ``q`` and ``k`` are multiplied by behind RMS norms without a
            weight, which they go through first; None if they are as they are to be.

    Returns:
        y, (B, L, H, Dv) in the dtype of ``q``, and the state behind the last token.

    Raises:
        ValueError: an argument has a shape or dtype that does not fit; it is named.

    Example:
        >>> q = v = mx.ones((1, 5, 2, 32)) / 8
        >>> gate, state = mx.ones((1, 5, 2)), mx.zeros((1, 2, 32, 32))
        >>> [y.shape for y in gated_delta(q, q, v, gate, gate, state)]
        [(1, 5, 2, 32), (1, 2, 32, 32)]

    Source: mlx-lm's ``gated_delta_ops``; arXiv 2412.06464.
    """
    arrays = q, k, v, g, beta, state, mask
    return dispatch(GATED_DELTA, arrays, (norms,))


def left_to_mlx_lm() -> bool:
    """Whether mlx-lm has a kernel of its own where kernels run now."""
    return device_of().stock_has_gated_delta


def _plan(arrays: Sequence[Any], norms: tuple[float, float, float] | None) -> Plan:
    _TAKES.check(*arrays)
    numbers = norms if isinstance(norms, tuple | list) else ()
    if norms is not None and not (len(numbers) == 3 and all(map(is_finite, numbers))):
        raise ValueError(f"norms must be an epsilon and two factors, finite numbers, not {norms!r}")
    q, _, v, *_ = arrays
    takes = v.size > 0 and kernels.takes(q.shape[-1])
    why = "mlx-lm has a kernel of its own on an Apple GPU" if left_to_mlx_lm() else None
    choice = choose("gated_delta", takes, reason=why)
    composed = partial(reference.gated_delta, norms=numbers)
    if choice.path == "reference":
        return Plan(choice, _stock(arrays, norms) or composed)
    return either(choice, composed, arrays, partial(kernels.gated_delta, arrays, *numbers))


def _stock(arrays: Sequence[Any], norms: object) -> Callable[..., list[mx.array]] | None:
    """MLX's own operator on an Apple GPU, where this MLX has it and it takes such arrays."""
    own: Any = getattr(mx.fast, "gated_delta_update", None)
    if own is None or not left_to_mlx_lm() or requested() != "auto":
        return None
    takes = norms is None and arrays[6] is None and arrays[3].ndim == 3
    return (lambda *given: list(own(*given[:6]))) if takes else None


def _sample(arrays: list[Any], *static: Any) -> list[Any]:
    """Short queries and keys, and gates below one, as models have them."""
    q, k, v, g, beta, *rest = arrays
    short = q.shape[-1] ** -0.5
    return [q * short, k * short, v, mx.sigmoid(g), mx.sigmoid(beta), *rest]


_TAKES = Signature("""
    q: float (B, L, Hk, Dk)
    k: q (B, L, Hk, Dk)
    v: q (B, L, H, Dv); Hk > 0 and H % Hk == 0
    g: float (B, L, H) or (B, L, H, Dk)
    beta: float (B, L, H)
    state: float32 (B, H, Dv, Dk)
    mask: bool (B, L) or None
""")
GATED_DELTA = Operation("gated_delta", _plan, sample=_sample)
