"""Attention of many queries by tiled kernels: what they take, and the gradients."""

from __future__ import annotations

from math import prod
from typing import Any, cast

import mlx.core as mx

from ..metal import attention_backward as backward
from ..metal.attention import FAR, Call, Scores, attention_forward
from ..metal.attention_layout import WIDEST
from ..reference import attention as reference
from ..reference.attention import Packed
from ..runtime.backend import backend, choose

BACKENDS = ("metal", "cuda", "host")
# Forward, on two cores, as benchmarks/bench_attention_tiles.py measures it; with gradients 0.25.
HOST_GAIN = 0.4
# The exponent of a hidden score must be finite: see LOWEST in attention_tile.metal.
_MAX_SCALE = 1e7
# Queries that would leave most of a tile empty.
_FEW = 8
# Scores below which stock is done on CUDA before Python has called the kernel: 32 heads with 256
# queries in a window took 0.11 ms by kernel, 0.07 by stock.
_WORTH_A_CALL = 1 << 24
# Sizes of keys and values for which stock is unfused on CUDA and was measured slower.
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
        lacks = lacking(q, k, v, scores.scale)
        self._scores = scores
        self._backends = () if lacks else BACKENDS
        self.unless = lacks or stock_is_better(q, k, v, mask, sinks, scores)
        self._mask = "causal" if scores.causal else None

    def __call__(
        self, q: mx.array, k: Any, v: Any, mask: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        scores = self._scores
        path = choose("attention", self._backends, unless=self.unless, host_gain=HOST_GAIN)
        if path != "ops":
            return attention(q, k, v, mask, sinks, scores)
        seen = self._mask if mask is None else mask
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
    gradients unfused there. On CUDA they are taken only where they were measured to be no slower,
    forward and with gradients: ``benchmarks/bench_attention_tiles.py``.
    """
    if q.shape[2] <= _FEW:
        return f"{q.shape[2]} queries; tiles of them would be mostly empty"
    if backend() != "cuda":
        return None
    arrays = isinstance(k, tuple) or isinstance(mask, mx.array) or sinks is not None
    if arrays or q.dtype == mx.float32:
        return "on CUDA the stock operator is faster with these arrays, or nothing was measured"
    if prod(q.shape[:3]) * reference.keys(k) < _WORTH_A_CALL:
        return "on CUDA the stock operator takes less time than Python to call the kernel"
    narrow = scores.window is not None and 2 * scores.window <= reference.keys(k)
    lacking = q.shape[3] <= 128 and (scores.softcap is not None or narrow)
    if lacking or (q.shape[3], _dense(v, k, q.shape[3]).shape[3]) in _WITHOUT_CUDNN:
        return None
    return "on CUDA the stock operator was measured faster, with gradients too"


def attention(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    mask: mx.array | None,
    sinks: mx.array | None,
    scores: Scores,
) -> mx.array:
    """:func:`mlx_qlayers.attention` of arguments that the kernels take.

    Packed keys and values are unpacked first. The gradient of an additive mask, the only one as
    large as the scores, is computed only where it is asked for: the mask passes an identity of its
    own, as in ``separate_gradients``.
    """
    dense = [q, _dense(k, k, q.shape[3]), _dense(v, k, q.shape[3])]
    arrays = [a.astype(mx.result_type(*dense)) for a in dense]
    fixed = mask if mask is not None and mask.dtype == mx.bool_ else None
    added = mask is not None and fixed is None
    # What the gradient of the mask needs, left by that of the rest, which comes before it.
    given: list[mx.array] = []

    def call_of(q: mx.array, k: mx.array, v: mx.array, *others: mx.array) -> Call:
        return Call(
            q,
            k,
            v,
            others[0] if added else fixed,
            None if sinks is None else others[-1],
            scores,
        )

    @mx.custom_function
    def operator(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        return attention_forward(call_of(*arrays))

    @operator.vjp
    def _(
        arrays: tuple[mx.array, ...],
        cotangents: tuple[mx.array, mx.array],
        outputs: tuple[mx.array, mx.array],
    ) -> list[mx.array]:
        call, (out, norms), d_out = call_of(*arrays), outputs, cotangents[0]
        given[:] = [*arrays, out, norms, d_out]
        d_q, delta = backward.gradient_queries(call, out, norms, d_out)
        gradients = [d_q, *backward.gradient_keys_and_values(call, norms, delta, d_out)]
        if added:
            gradients.append(mx.broadcast_to(mx.array(0, arrays[3].dtype), arrays[3].shape))
        if call.sinks is not None:
            gradients.append(backward.gradient_sinks(call.sinks, norms, delta))
        return gradients

    @mx.custom_function
    def hold(mask: mx.array) -> mx.array:
        return mask

    @hold.vjp
    def _(mask: mx.array, zeros: mx.array, _: mx.array) -> mx.array:
        *arrays, out, norms, d_out = given
        gradient = backward.gradient_mask(call_of(*arrays), out, norms, d_out, mask.shape)
        return gradient.astype(mask.dtype)

    if added:
        arrays.append(cast(mx.array, hold(mask)))
    if sinks is not None:
        arrays.append(sinks)
    out, _ = cast(tuple[mx.array, mx.array], operator(*arrays))
    return out


def _dense(array: mx.array | Packed, k: mx.array | Packed, width: int) -> mx.array:
    """An array itself, or what it was before it was packed like ``k``."""
    if not isinstance(array, tuple) or not isinstance(k, tuple):
        assert isinstance(array, mx.array)
        return array
    group_size, bits = reference.packing(k, width)
    return mx.dequantize(*array, group_size=group_size, bits=bits)
