"""Attention of many queries by tiled kernels: what they take, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import mlx.core as mx

from ..dispatch.measurements import configure, threshold
from ..metal.attention import backward as backward
from ..metal.attention.forward import FAR, Arrays, Call, Scores, attention_forward
from ..metal.attention.layout import WIDEST
from ..reference import attention as reference
from ..reference.attention import Packed
from ..runtime.backend import backend
from ..runtime.legacy import Note, count, decide
from .differentiable import gradients_are_left_out

BACKENDS = ("metal", "cuda", "host")
# The exponent of a hidden score must be finite: see LOWEST in attention_tile.metal.
_MAX_SCALE = 1e7
# Queries that would leave most of a tile empty.
_FEW = 8


def lacking(q: mx.array, k: mx.array | Packed, v: mx.array | Packed, scale: float) -> str | None:
    """Why the kernels do not take these arguments, if they do not."""
    width, v_width = q.shape[3], _dense(v, k, q.shape[3]).shape[3]
    if q.size == 0 or v_width == 0:
        return "there is nothing to compute"
    if width % 8 or v_width % 8 or width < 32 or max(width, v_width) > WIDEST:
        return f"heads of {width} and {v_width}; kernels take multiples of 8 from 32 to {WIDEST}"
    if max(q.shape[2], reference.keys(k)) >= FAR:
        return f"{FAR} queries or keys, or more"
    if not 0 < scale <= _MAX_SCALE:
        return f"a scale of {scale}; kernels take positive ones up to {_MAX_SCALE:g}"
    return None


class Attention:
    """:func:`mlx_qlayers.attention` of any arrays with the shapes and dtypes of these.

    They have been checked. None of them is kept.

    Attributes:
        unless: why ``auto`` leaves the kernels, or None.
    """

    def __init__(
        self,
        q: mx.array,
        k: mx.array | Packed,
        v: mx.array | Packed,
        mask: mx.array | str | None,
        sinks: mx.array | None,
        scores: Scores,
    ) -> None:
        self._scores = scores
        lacks = lacking(q, k, v, scores.scale)
        self._backends = () if lacks else BACKENDS
        self.unless = lacks or stock_is_better(q, k, v, mask, sinks, scores)
        self._mask = "causal" if scores.causal else None
        self._settled: Note | None = None
        self._kernels: Kernels | None = None

    def __call__(
        self, q: mx.array, k: Any, v: Any, mask: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        if self._settled is None:
            gain = threshold("attention_forward_gain", device="host")
            self._settled = decide("attention", self._backends, unless=self.unless, host_gain=gain)
        count(self._settled)
        if self._settled[1] != "ops":
            if self._kernels is None:
                self._kernels = Kernels(q, k, v, mask, sinks, self._scores)
            return self._kernels(q, k, v, mask, sinks)
        scores, seen = self._scores, self._mask if mask is None else mask
        return reference.attention(
            q, k, v, scores.scale, seen, scores.window, scores.softcap, sinks
        )


def stock_is_better(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    scores: Scores,
) -> str | None:
    """Why ``auto`` should take the stock operator, if it should.

    On Apple GPUs, where nothing could be measured, kernels are taken because stock computes
    gradients unfused there. On CUDA they are taken only where they were measured to be no slower:
    ``benchmarks/bench_attention_tiles.py``.
    """
    if q.shape[2] <= _FEW:
        return f"{q.shape[2]} queries; tiles of them would be mostly empty"
    if backend() != "cuda":
        return None
    if isinstance(v, tuple) or isinstance(mask, mx.array) or sinks is not None:
        return "on CUDA the stock operator is faster with these arrays, or nothing was measured"
    if q.dtype == mx.float32:
        return "on CUDA the stock operator is faster in float32, with gradients"
    sizes = q.shape[3], v.shape[3]
    if max(sizes) > threshold("attention_forward_widest", device="cuda"):
        known = sizes in threshold("attention_forward_wide_heads", device="cuda")
        return None if known else "heads of these sizes were not measured on CUDA"
    pairs, keys = prod(q.shape[:3]) * v.shape[2], v.shape[2]
    narrow = scores.window is not None and 2 * scores.window <= keys
    if gradients_are_left_out():
        # Launches that are traced ahead, of which stock's take longer.
        work = pairs // (1 + scores.causal) * sum(sizes)
        short, little = (
            threshold("attention_forward_short", which, device="cuda") for which in ("keys", "work")
        )
        better = narrow or (keys <= short and work <= little)
    else:
        better = narrow and pairs >= threshold("attention_forward_min_scores", device="cuda")
    if better or scores.softcap is not None:
        return None
    return "on CUDA the stock operator was measured faster, with gradients too"


class Kernels:
    """Attention by kernels, which take these arrays, of any with their shapes and dtypes.

    Packed keys and values are unpacked first. The gradient of an additive mask, the only one as
    large as the scores, is computed only where it is asked for: the mask passes an identity of its
    own, as in ``separate_gradients``.
    """

    def __init__(
        self,
        q: mx.array,
        k: mx.array | Packed,
        v: mx.array | Packed,
        mask: mx.array | None,
        sinks: mx.array | None,
        scores: Scores,
    ) -> None:
        dense = [q, _dense(k, k, q.shape[3]), _dense(v, k, q.shape[3])]
        self._dtype = mx.result_type(*dense)
        q, k, v = (a.astype(self._dtype) for a in dense)
        self._call = Call(Arrays(q, k, v, mask, sinks), scores)
        self._layout = configure("attention_forward", backend(), *self._call.question())
        self._masked, self._sinks = mask is not None, sinks is not None
        self._added = mask is not None and mask.dtype != mx.bool_
        self._operator = self._differentiable([])

    def __call__(
        self,
        q: mx.array,
        k: mx.array | Packed,
        v: mx.array | Packed,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        dense = [q, _dense(k, k, q.shape[3]), _dense(v, k, q.shape[3])]
        arrays = [a if a.dtype == self._dtype else a.astype(self._dtype) for a in dense]
        given = [*arrays, *(a for a in (mask, sinks) if a is not None)]
        if gradients_are_left_out():
            return attention_forward(self._call, self._named(given), self._layout)[0]
        operator = self._operator
        if mask is not None and self._added:
            left: list[mx.array] = []
            operator, given[3] = self._differentiable(left), self._held(mask, left)
        out: mx.array = operator(*given)[0]
        return out

    def _named(self, given: Sequence[mx.array]) -> Arrays:
        q, k, v, *others = given
        mask = others[0] if self._masked else None
        return Arrays(q, k, v, mask, others[-1] if self._sinks else None)

    def _differentiable(self, left: list[mx.array]) -> Callable[..., Any]:
        """The operator; its gradient puts into ``left`` what that of an additive mask needs."""
        call, layout = self._call, self._layout

        @mx.custom_function
        def operator(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            return attention_forward(call, self._named(arrays), layout)

        @operator.vjp
        def _(
            arrays: tuple[mx.array, ...],
            cotangents: tuple[mx.array, mx.array],
            outputs: tuple[mx.array, mx.array],
        ) -> list[mx.array]:
            named, (out, norms), d_out = self._named(arrays), outputs, cotangents[0]
            if self._added:
                left[:] = [*arrays, out, norms, d_out]
            d_q, delta = backward.gradient_queries(call, named, out, norms, d_out)
            d_kv = backward.gradient_keys_and_values(call, named, norms, delta, d_out)
            gradients = [d_q, *d_kv]
            if named.mask is not None:
                zero = mx.array(0, named.mask.dtype)
                gradients.append(mx.broadcast_to(zero, named.mask.shape))
            if named.sinks is not None:
                gradients.append(backward.gradient_sinks(named.sinks, norms, delta))
            return gradients

        return operator

    def _held(self, mask: mx.array, left: list[mx.array]) -> mx.array:
        """The mask; its gradient takes what that of the rest, which comes before it, puts there."""

        @mx.custom_function
        def hold(mask: mx.array) -> mx.array:
            return mask

        @hold.vjp
        def _(mask: mx.array, zeros: mx.array, _: mx.array) -> mx.array:
            *arrays, out, norms, d_out = left
            named = self._named(arrays)
            gradient = backward.gradient_mask(self._call, named, out, norms, d_out, mask.shape)
            return gradient.astype(mask.dtype)

        return cast(mx.array, hold(mask))


def _dense(array: mx.array | Packed, k: mx.array | Packed, width: int) -> mx.array:
    """An array itself, or what it was before it was packed like ``k``."""
    if not isinstance(array, tuple) or not isinstance(k, tuple):
        assert isinstance(array, mx.array)
        return array
    group_size, bits = reference.packing(k, width)
    return mx.dequantize(*array, group_size=group_size, bits=bits)
