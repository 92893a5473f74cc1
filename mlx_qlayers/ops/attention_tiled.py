"""Attention of many queries by tiled kernels: what they take, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import mlx.core as mx

from ..metal import attention_backward as backward
from ..metal.attention import FAR, Arrays, Call, Scores, attention_forward
from ..metal.attention_layout import WIDEST
from ..reference import attention as reference
from ..reference.attention import Packed
from ..runtime.backend import Note, backend, count, decide
from .attention_stock import alone
from .differentiable import gradients_are_left_out
from .traced import Place, Traced, place

BACKENDS = ("metal", "cuda", "host")
# Forward, on two cores, as benchmarks/bench_attention_tiles.py measures it; with gradients 0.25.
HOST_GAIN = 0.4
# The exponent of a hidden score must be finite: see LOWEST in attention_tile.metal.
_MAX_SCALE = 1e7
# Queries that would leave most of a tile empty.
_FEW = 8
# Keys and scores of short sequences: see :func:`_is_short`.
_SHORT, _FEW_SCORES = 1024, 1 << 24
# Wider heads are unfused by stock on CUDA; sizes of keys and values that were measured slower.
_WIDEST_OF_CUDNN = 128
_WITHOUT_CUDNN = ((192, 128), (256, 256))


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
        self.unless = lacks or stock_is_better(q, k, v, mask, sinks, scores)
        within = None if self.unless else stock_is_called_faster(q, k, v, scores)

        def decided(unless: str | None) -> Note:
            backends = () if lacks else BACKENDS
            return decide("attention", backends, unless=unless, host_gain=HOST_GAIN)

        # Where it is evaluated only, and where somebody else traces or differentiates it.
        self._evaluated, self._within = decided(self.unless), decided(self.unless or within)
        self._stock = alone(q, k, v, mask, sinks, scores, within)
        self._mask = "causal" if scores.causal else None
        self._is_traced_ahead = self._evaluated[1] != "ops" and not gradients_are_left_out()
        self._traces: dict[Place, tuple[Traced, list[Note]]] = {}
        self._kernels: Kernels | None = None

    def __call__(
        self, q: mx.array, k: Any, v: Any, mask: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        if not self._is_traced_ahead or (at := place()) is None:
            return self._run(q, k, v, mask, sinks)
        if at not in self._traces:
            traced = Traced(self._run, counted=True)
            self._traces[at] = traced, traced.ahead(q, k, v, mask, sinks)
        traced, notes = self._traces[at]
        out: mx.array = traced.again(notes, q, k, v, mask, sinks)
        return out

    def _run(
        self, q: mx.array, k: Any, v: Any, mask: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        evaluated = gradients_are_left_out()
        if self._stock is not None and not evaluated:
            return self._stock(q, k, v, mask, sinks)
        decision = self._evaluated if evaluated else self._within
        count(decision)
        if decision[1] != "ops":
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
        return "on CUDA the stock operator is faster in float32"
    narrow = scores.window is not None and 2 * scores.window <= reference.keys(k)
    better = scores.softcap is not None or narrow or _is_short(q, k)
    if (_is_fused(q, v) and better) or (q.shape[3], v.shape[3]) in _WITHOUT_CUDNN:
        return None
    return "on CUDA the stock operator was measured faster, with gradients too"


def stock_is_called_faster(
    q: mx.array, k: mx.array | Packed, v: mx.array | Packed, scores: Scores
) -> str | None:
    """Why ``auto`` should leave the kernels where their launches are not traced ahead.

    On CUDA short sequences are over before Python has launched the kernels and those of the
    gradient: 32 heads with 256 queries took 94 microseconds with gradients by kernel, 70 by stock.
    """
    is_one = backend() == "cuda" and _is_fused(q, v) and scores.softcap is None
    if not is_one or not _is_short(q, k):
        return None
    return "on CUDA the stock operator takes less time than Python to launch kernels"


def _is_fused(q: mx.array, v: mx.array | Packed) -> bool:
    """Whether stock has one operator for heads of these sizes on CUDA."""
    return isinstance(v, mx.array) and max(q.shape[3], v.shape[3]) <= _WIDEST_OF_CUDNN


def _is_short(q: mx.array, k: mx.array | Packed) -> bool:
    """Whether calls on CUDA take the time of their launches, which is less for kernels."""
    keys = reference.keys(k)
    return keys <= _SHORT and prod(q.shape[:3]) * keys < _FEW_SCORES


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
            return attention_forward(self._call, self._named(given))[0]
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
        call = self._call

        @mx.custom_function
        def operator(*arrays: mx.array) -> tuple[mx.array, mx.array]:
            return attention_forward(call, self._named(arrays))

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
