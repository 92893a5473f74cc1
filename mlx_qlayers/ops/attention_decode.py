"""Attention of a few queries over a long cache, by kernel: what it takes, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..dispatch.measurements import configure, decided, found, threshold
from ..metal.attention.decode import BITS, MAX_QUERIES, MAX_WIDTH, Prepared, question
from ..metal.attention.forward import Scores
from ..reference import attention as reference
from ..reference.attention import Packed
from ..runtime.backend import backend, requested
from ..runtime.legacy import Note, count, decide
from . import attention_tiled
from .differentiable import gradients_are_left_out, with_gradient_of

_BACKENDS = ("metal", "cuda", "host")


def covers(q: mx.array, k: mx.array | Packed, v: mx.array | Packed) -> bool:
    """Whether the kernel takes these arguments."""
    queries, width = q.shape[2:]
    bits = reference.packing(k, width)[1] if isinstance(k, tuple) else 0
    v_width = 32 * v[0].shape[-1] // bits if isinstance(v, tuple) else v.shape[-1]
    widths_fit = width % 8 == v_width % 8 == 0 and 0 < max(width, v_width) <= MAX_WIDTH
    return 0 < queries <= MAX_QUERIES and q.size > 0 and widths_fit and bits in (0, *BITS)


class Attention:
    """:func:`mlx_qlayers.attention` of any arrays with the shapes and dtypes of these.

    They have been checked, and the kernel takes them. None of them is kept.

    Attributes:
        unless: why ``auto`` leaves the kernel, or None.
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
        self._packed = isinstance(k, tuple)
        parts = _parts(q, k, v)
        self._dtype = mx.result_type(*(a for a in parts if a.dtype != mx.uint32))
        self._mixed = any(a.dtype not in (self._dtype, mx.uint32) for a in parts)
        self._scores = scores
        self._mask = None if isinstance(mask, mx.array) or q.shape[2] == 1 else mask
        best = found("attention_decode", *question(q, k, v))
        unless = _why_stock(q, parts[1], self._packed, mask)
        by, self.unless, _ = decided(best, "few queries", unless)
        self._by = by if best else ""
        self._host_gain = _host_gain(q, parts[1].shape[2])
        self._operators: dict[str, Callable[..., Any]] = {}
        self._settled: Note | None = None

    def __call__(
        self,
        q: mx.array,
        k: Any,
        v: Any,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        decision = self._settled
        if decision is None:
            decision = self._decide([q, *k, *v] if self._packed else [q, k, v])
        count(decision)
        path = decision[1]
        if path == "ops":
            return reference.attention(*self._arguments(q, k, v, mask, sinks))
        if self._mixed:
            q, k, v = self._cast(q), self._cast(k), self._cast(v)
        if (operator := self._operators.get(path)) is None:
            given = self._arguments(q, k, v, mask, sinks)
            config = configure("attention_decode", path, *question(q, k, v))
            prepared = Prepared(config, *given)
            operator = with_gradient_of(self._differentiable, lambda *given: [prepared(*given)])
            self._operators[path] = operator
        out: mx.array = operator(q, k, v, mask, sinks)[0]
        return out

    def _decide(self, arrays: list[mx.array]) -> Note:
        decision = decide(
            "attention",
            _BACKENDS,
            unless=self.unless,
            host_gain=self._host_gain,
            arrays=arrays,
            by=self._by,
        )
        if backend() != "host":
            self._settled = decision
        return decision

    def _arguments(self, q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> tuple[Any, ...]:
        mask, scores = self._mask if mask is None else mask, self._scores
        return q, k, v, scores.scale, mask, scores.window, scores.softcap, sinks

    def _cast(self, array: Any) -> Any:
        if isinstance(array, tuple):
            return tuple(map(self._cast, array))
        return array if array.dtype == mx.uint32 else array.astype(self._dtype)

    def _differentiable(self, *given: Any) -> list[mx.array]:
        """The same on the path that has a gradient: by kernels if those were asked for."""
        q, k, v, mask, sinks = given
        if requested() != "auto" and not attention_tiled.lacking(q, k, v, self._scores.scale):
            kernels = attention_tiled.Kernels(q, k, v, mask, sinks, self._scores)
            return [kernels(q, k, v, mask, sinks)]
        return [reference.attention(*self._arguments(*given))]


def _parts(*arrays: mx.array | Packed) -> list[mx.array]:
    return [part for a in arrays for part in (a if isinstance(a, tuple) else (a,))]


def _why_stock(
    q: mx.array, keys: mx.array, packed: bool, mask: mx.array | str | None
) -> str | None:
    """Why ``auto`` leaves this kernel for the stock operator on a GPU.

    On CUDA the kernel was measured no slower from 256 keys to 131,072 where its launches are traced
    ahead. Called one by one, they take Python longer than one stock operator; with packed keys or
    an array as mask stock makes several.
    """
    device = backend()
    if device == "metal":
        return "the kernel was not measured on an Apple GPU"
    batch, kv_heads, length, _ = keys.shape
    if device != "cuda" or packed or isinstance(mask, mx.array) or gradients_are_left_out():
        return None
    least = threshold("attention_decode_min_elements", device=device)
    if batch * kv_heads * length * q.shape[3] < least:
        return "on CUDA the stock operator is launched faster, and the cache is short"
    return None


def _host_gain(q: mx.array, keys: int) -> float:
    """How many times as fast as the reference the kernel is on a CPU: by launch and work."""
    work = q.size * keys * 2e-6
    stock, kernel = (
        launch + each * work
        for launch, each in (
            threshold("attention_decode_cost", path, device="host")
            for path in ("reference", "kernel")
        )
    )
    return float(stock / kernel)
