"""Launches the kernels of the gradients of attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.launch import Bound
from ...runtime.spec import Spec
from .forward import LOG2E, Launcher, absent
from .layout import PARAMETERS, memory

# What lowers the scores of a query that sees no key, as score_tile.metal has it.
_BLANK = 1e38

_RULE = ("T", "M", "D", "DV", "MASK", "SOFTCAP")
_QUERIES, _MASK = (
    Kernel(
        name,
        "attention/backward.metal",
        inputs=("q", "k", "v", "mask", "out", "d_out", "norms", "sizes", "factors"),
        outputs=outputs,
        template=(*_RULE, *PARAMETERS),
        threadgroup_memory=lambda **values: memory("queries", values),
        large=True,
        ensure_row_contiguous=False,
    )
    for name, outputs in (
        ("attention_backward_queries", ("d_q", "delta")),
        ("attention_backward_mask", ("d_scores",)),
    )
)
_KEYS = Kernel(
    "attention_backward_keys",
    "attention/backward_keys.metal",
    inputs=("q", "k", "v", "mask", "d_out", "norms", "delta", "average", "sizes", "factors"),
    outputs=("d_k", "d_v"),
    template=(*_RULE, "AVERAGE", "ROLES", *PARAMETERS),
    threadgroup_memory=lambda **values: memory("keys", values),
    large=True,
    ensure_row_contiguous=False,
)

Arrays = Sequence[Any]


class Backward:
    """The gradients of attention for arrays of some shapes; launches are bound at first use.

    Its methods take lists: q, k, v, mask and sinks; the cotangents of what
    :func:`attention_forward` gave for them, of which the first counts; and that itself.
    """

    def __init__(self, at: Launcher) -> None:
        self._at, self._blank = at, absent()
        self._rows = at.batch, at.heads, at.queries
        self._out = Spec((*self._rows, at.v_width), at.q.dtype)
        self._norms = Spec((*self._rows, 2), mx.float32)

    @cached_property
    def _queries(self) -> Bound:
        at = self._at
        shapes = [(at.batch, at.queries, at.heads, at.width), self._rows]
        return self._of_queries(_QUERIES, shapes)

    @cached_property
    def _mask(self) -> Bound:
        return self._of_queries(_MASK, [(*self._rows, self._at.keys)], init_value=0)

    def _of_queries(self, kernel: Kernel, shapes: list[tuple[int, ...]], **more: Any) -> Bound:
        at, others = self._at, [self._out, self._out, self._norms]
        rows = at.queries, at.heads
        return at.bind(kernel, others, at.layout("queries"), rows, shapes, **more)

    @cached_property
    def _keys(self) -> Bound:
        at, chosen = self._at, self._at.layout("keys")
        average = (at.batch, at.kv_heads, at.v_width) if at.average else self._blank.shape
        others = self._out, self._norms, Spec(self._rows, mx.float32), Spec(average, mx.float32)
        shapes = [(at.batch, at.keys, at.kv_heads, width) for width in (at.width, at.v_width)]
        values = {"AVERAGE": at.average, "ROLES": chosen.roles}
        return at.bind(_KEYS, others, chosen, (at.keys, at.kv_heads), shapes, **values)

    def _inputs(self, arrays: Arrays) -> list[mx.array]:
        q, k, v, mask, _ = arrays
        seen = self._blank if mask is None else mx.broadcast_to(mask, self._at.mask_shape)
        return [q, k, v, seen]

    def of_all(self, arrays: Arrays, cotangents: Arrays, outputs: Arrays) -> list[mx.array]:
        """Those of q, k, v and, if there are any, of the sinks."""
        sinks, (out, norms), d_out = arrays[4], outputs, cotangents[0]
        inputs, ends = self._inputs(arrays), self._at.ends
        d_q, delta = self._queries([*inputs, out, d_out, norms, *ends])
        average = self._average(norms, d_out) if self._at.average else self._blank
        d_k, d_v = self._keys([*inputs, d_out, norms, delta, average, *ends])
        gradients = [a.swapaxes(1, 2) for a in (d_q, d_k, d_v)]
        return gradients if sinks is None else [*gradients, _of_sinks(sinks, norms, delta)]

    def of_mask(self, arrays: Arrays, cotangents: Arrays, outputs: Arrays) -> list[mx.array]:
        """That of the mask."""
        mask, (out, norms) = arrays[3], outputs
        inputs = [*self._inputs(arrays), out, cotangents[0], norms]
        (d_scores,) = self._mask([*inputs, *self._at.ends])
        shared = [i for i, n in enumerate((1,) * (4 - mask.ndim) + mask.shape) if n == 1]
        gradient = d_scores.sum(axis=shared, keepdims=True).reshape(mask.shape)
        return [gradient.astype(mask.dtype)]

    def _average(self, norms: mx.array, d_out: mx.array) -> mx.array:
        """What each value gets of the queries that see no key: (B, Hkv, Dv)."""
        at = self._at
        share = mx.where(norms[..., :1] == _BLANK, 1 / at.keys, 0.0)
        shared = (d_out.astype(mx.float32) * share).sum(axis=2)
        return mx.contiguous(shared.reshape(at.batch, at.kv_heads, -1, at.v_width).sum(axis=2))


def _of_sinks(sinks: mx.array, norms: mx.array, delta: mx.array) -> mx.array:
    """The gradient of ``sinks``, (H,) in their dtype."""
    top, total = norms[..., 0], norms[..., 1]
    weight = mx.power(2, LOG2E * sinks.astype(mx.float32)[:, None] - top) / total
    return -(weight * delta).sum(axis=(0, 2)).astype(sinks.dtype)
