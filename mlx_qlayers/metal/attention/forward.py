"""Launches attention of many queries; attention_backward.py launches its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import e, log2
from typing import NamedTuple

import mlx.core as mx

from ...runtime.backend import backend
from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.legacy import PreparedLaunch
from .layout import PARAMETERS, Layout, layout, memory, rounded

# More queries or keys than there can be: positions are 32-bit numbers, and so are their sums.
FAR = 2**28
LOG2E = log2(e)
_NO_MASK, _BOOLEAN, _ADDED = range(3)

_FORWARD = Kernel(
    "attention_forward",
    "attention/forward.metal",
    inputs=("q", "k", "v", "mask", "sinks", "mean", "sizes", "numbers"),
    outputs=("out", "norms"),
    template=("T", "M", "N", "D", "DV", "MASK", "SOFTCAP", "SINKS", "AVERAGE", *PARAMETERS),
    threadgroup_memory=lambda **values: memory("forward", values),
    large=True,
    ensure_row_contiguous=False,
)


@dataclass(frozen=True)
class Scores:
    """What becomes of the products of queries and keys.

    Attributes:
        scale: what they are multiplied by.
        causal: whether a query sees no key that comes after it.
        window: how many keys a query sees, itself included, or None.
        softcap: the bound of the scores, or None.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None


class Arrays(NamedTuple):
    """What attention is computed of.

    Attributes:
        q: queries (B, H, L, D).
        k: keys (B, Hkv, S, D), in the dtype of ``q``.
        v: values (B, Hkv, S, Dv), likewise.
        mask: booleans or numbers that broadcast to (B, H, L, S), or None.
        sinks: (H,) or None.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    mask: mx.array | None = None
    sinks: mx.array | None = None


class Call:
    """What calls have in common whose arrays have the same shapes and dtypes.

    What Python works out for a short prompt takes longer than its launches; here it is kept.

    Args:
        arrays: those of one call, of which none is kept.
        scores: the other options.
    """

    def __init__(self, arrays: Arrays, scores: Scores) -> None:
        q, _, v, mask, sinks = arrays
        self.batch, self.heads, self.queries, self.width = q.shape
        _, self.kv_heads, self.keys, self.width_v = v.shape
        self.causal, self.sinks = scores.causal, sinks is not None
        bounded = scores.causal or scores.window is not None
        # Some query may see no key, and then gets the mean of the values.
        self.average = sinks is None and (
            mask is not None or (bounded and self.queries > self.keys)
        )
        self._sizes = _integers(
            self.queries,
            self.keys,
            self.heads,
            self.heads // self.kv_heads,
            self.keys - self.queries if bounded else FAR,
            min(scores.window or 2 * FAR, 2 * FAR),
        )
        cap, scale = scores.softcap, scores.scale
        factors = (scale * LOG2E, 0.0) if cap is None else (scale / cap, cap * LOG2E)
        self._numbers = _floats(*factors, scale)
        # Its strides say how it repeats. One more axis keeps a small one from being `constant`.
        self._mask_shape = (8, self.batch, self.heads, self.queries, self.keys)
        kind = _NO_MASK if mask is None else _BOOLEAN if mask.dtype == mx.bool_ else _ADDED
        self._dtype = q.dtype
        self._template: dict[str, TemplateValue] = {
            "T": q.dtype,
            "M": (nothing() if mask is None else mask).dtype,
            "D": self.width,
            "DV": self.width_v,
            "MASK": kind,
            "SOFTCAP": cap is not None,
        }
        self._prepared: dict[tuple[Kernel, Layout | None], PreparedLaunch] = {}

    def launch(
        self,
        kernel: Kernel,
        arrays: Arrays,
        others: Sequence[mx.array],
        make: Callable[[Layout | None], PreparedLaunch],
        chosen: Layout | None,
    ) -> list[mx.array]:
        """Launch a kernel on some arrays and what it takes besides, as ``make`` prepares it."""
        prepared = self._prepared.get((kernel, chosen))
        if prepared is None:
            prepared = self._prepared[kernel, chosen] = make(chosen)
        q, k, v, mask, _ = arrays
        mask = nothing() if mask is None else mx.broadcast_to(mask, self._mask_shape)
        return prepared([q, k, v, mask, *others, self._sizes, self._numbers])

    def prepare(
        self,
        kernel: Kernel,
        chosen: Layout,
        rows: tuple[int, int],
        output_shapes: Sequence[Sequence[int]],
        init_value: float | None = None,
        **values: TemplateValue,
    ) -> PreparedLaunch:
        """The launch of as many threadgroups as own so many rows of so many heads."""
        groups, heads = -(-rows[0] // chosen.rows), rows[1]
        return PreparedLaunch(
            kernel,
            {**self._template, **chosen.template(), **values},
            (chosen.threads * groups, heads, self.batch),
            (chosen.threads, 1, 1),
            output_shapes,
            init_value,
        )

    def layout(self, kernel: str) -> Layout:
        """How a kernel spreads the work."""
        return layout(kernel, backend(), self._dtype, max(self.width, self.width_v))

    def question(self) -> tuple[tuple[int, ...], mx.Dtype, bool]:
        """What dispatch is asked about the forward kernel: the fields of its problem."""
        lengths = rounded(self.queries), rounded(self.keys)
        shape = (self.batch, self.heads, self.kv_heads, *lengths, self.width, self.width_v)
        return shape, self._dtype, self.causal


def attention_forward(
    call: Call, arrays: Arrays, chosen: Layout | None = None
) -> tuple[mx.array, mx.array]:
    """Attention, and the norms that its gradient needs.

    Args:
        call: what is known of the arrays.
        arrays: what it is computed of.
        chosen: how to spread the work, if not as the table says.

    Returns:
        (B, H, L, Dv) in the dtype of ``q``, heads side by side in memory as the projection that
        comes next wants them; and (B, H, L, 2) float32, for each query the largest score in units
        of log2, and the sum of 2 to the scores less that.
    """
    sinks = nothing() if arrays.sinks is None else arrays.sinks
    mean = arrays.v.astype(mx.float32).mean(axis=2) if call.average else nothing()

    def make(chosen: Layout | None) -> PreparedLaunch:
        return call.prepare(
            _FORWARD,
            chosen or call.layout("forward"),
            (call.queries, call.heads),
            [
                (call.batch, call.queries, call.heads, call.width_v),
                (call.batch, call.heads, call.queries, 2),
            ],
            N=sinks.dtype,
            SINKS=call.sinks,
            AVERAGE=call.average,
        )

    out, norms = call.launch(_FORWARD, arrays, (sinks, mean), make, chosen)
    return out.swapaxes(1, 2), norms


@lru_cache(maxsize=1)
def nothing() -> mx.array:
    """What stands for an array that is not there.

    It is evaluated at once: what is being traced can use it, and need not make it anew.
    """
    array = mx.zeros((1, 1, 1, 1, 8))
    mx.eval(array)
    return array


@lru_cache(maxsize=1024)
def _integers(*values: int) -> mx.array:
    return mx.array(values, mx.int32)


@lru_cache(maxsize=1024)
def _floats(*values: float) -> mx.array:
    return mx.array(values, mx.float32)
