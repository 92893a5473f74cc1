"""Launches attention of many queries; backward.py launches its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ...options import AttentionCall
from ...runtime.backend import backend, requested, use_backend
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound, Size, TemplateValue
from ...runtime.spec import Spec
from ..common.kernels import LOG2E, strided_kernel, without
from ..record import rounded
from .layout import Layout, layout, memory, registers

# More queries or keys than there can be: positions are 32-bit numbers, and so are their sums.
FAR = 2**28
_NO_MASK, _BOOLEAN, _ADDED = range(3)

_GROUPS = ("k_scales", "k_biases", "v_scales", "v_biases")
_PACKED = strided_kernel(
    "attention_forward_packed",
    "attention/forward.metal",
    function="attention_forward",
    threadgroup_memory=lambda **values: memory("forward", values),
    registers=lambda **values: registers("forward", values),
)
_OF_PACKED = *_GROUPS, *(f"{name}_strides" for name in _GROUPS)
_FORWARD = without(_PACKED, _OF_PACKED, "attention_forward")


class Launcher:
    """Binds the kernels of attention of many queries to the shapes of one call.

    ``handed`` says whether tensor operations may take scores as an operand in registers.

    Attributes:
        average: whether a query may see no key; it gets the mean of the values.
        mask_shape: the mask is broadcast to it, with one more axis, lest a small mask be passed as
            ``constant``.
        ends: the last two inputs of each kernel: sizes and factors.
    """

    def __init__(self, call: AttentionCall, handed: bool = True) -> None:
        q, k, v, scores, mask, sinks = call
        self.q, self.sinks, self.causal, self.device = q, sinks, scores.causal, backend()
        self.asked, self.deterministic, self.handed = requested(), scores.deterministic, handed
        self.batch, self.heads, self.queries, self.width = q.shape
        _, self.kv_heads, self.keys, _ = v[0].shape
        self.v_width, self.packing = call.v_width, call.packing
        bounded = scores.causal or scores.window is not None
        self.average = sinks is None and (
            mask is not None or (bounded and self.queries > self.keys)
        )
        counts = self.queries, self.keys, self.heads, self.heads // self.kv_heads
        reach = self.keys - self.queries if bounded else FAR
        sizes = [*counts, reach, min(scores.window or 2 * FAR, 2 * FAR)]
        cap, scale = scores.softcap, scores.scale
        factors = (scale * LOG2E, 0.0) if cap is None else (scale / cap, cap * LOG2E)
        self.ends = mx.array(sizes, mx.int32), mx.array([*factors, scale], mx.float32)
        self.mask_shape = (8, self.batch, self.heads, self.queries, self.keys)
        seen = Spec.of(absent()) if mask is None else Spec(self.mask_shape, mask.dtype)
        self._inputs = [q, *k, *v, seen]
        self._template: dict[str, TemplateValue] = {
            "T": q.dtype,
            "M": seen.dtype,
            "D": self.width,
            "DV": self.v_width,
            "MASK": _NO_MASK if mask is None else _BOOLEAN if mask.dtype == mx.bool_ else _ADDED,
            "SOFTCAP": cap is not None,
        }

    def bind(
        self,
        kernel: Kernel,
        others: Sequence[Spec],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[Sequence[int]],
        init_value: float | None = None,
        **values: TemplateValue,
    ) -> Bound:
        """A launch, whose arrays are q, k, v, the broadcast mask, ``others``, sizes and factors."""
        # Gradients are bound later, maybe where another backend was asked for.
        with use_backend(self.asked):
            return kernel.bind(
                [*self._inputs, *others, *map(Spec.of, self.ends)],
                template={**self._template, **values},
                grid=grid,
                threadgroup=threadgroup,
                output_shapes=output_shapes,
                init_value=init_value,
            )

    def forward(
        self, kernel: Kernel, grid: Size, threadgroup: Size, /, **values: Any
    ) -> Callable[..., list[mx.array]]:
        """The launch of a forward pass, as :func:`attention_forward` describes it."""
        nothing = Spec.of(absent())
        sinks = nothing if self.sinks is None else self.sinks
        mean = Spec((self.batch, self.kv_heads, self.v_width), mx.float32)
        values |= {"N": sinks.dtype, "SINKS": self.sinks is not None, "AVERAGE": self.average}
        norms = self.batch, self.heads, self.queries, 2
        shapes = [(self.batch, self.queries, self.heads, self.v_width), norms]
        others = [sinks, mean if self.average else nothing]
        launch = self.bind(kernel, others, grid, threadgroup, shapes, **values)

        def run(*arrays: mx.array | None) -> list[mx.array]:
            out, norms = launch(forward_inputs(self, *arrays))
            return [out.swapaxes(1, 2), norms]

        return run

    def layout(self, kernel: str) -> Layout:
        """How a kernel spreads the work, as the table says."""
        return layout(kernel, self.device, self.q.dtype, max(self.width, self.v_width))

    def key(self) -> tuple[tuple[int, ...], mx.Dtype, bool, int]:
        """The key of the forward kernel: shape, dtype, whether it is causal, bits."""
        lengths = rounded(self.queries), rounded(self.keys)
        shape = (self.batch, self.heads, self.kv_heads, *lengths, self.width, self.v_width)
        return shape, self.q.dtype, self.causal, self.packing.widest


def attention_forward(at: Launcher, chosen: Layout | None = None) -> Callable[..., list[mx.array]]:
    """Binds attention, with the norms that its gradient needs.

    The launch takes q, k, v (or the three arrays of each), mask and sinks. It gives (B, H, L, Dv),
    which is (B, L, H, Dv) in memory, and the norms (B, H, L, 2) float32: the largest score of each
    query in units of log2, and the sum of 2 to the scores less that.
    """
    group_size, bits, v_bits = at.packing
    chosen = chosen or at.layout("packed" if bits else "forward")
    values = {"K": mx.uint32 if bits else at.q.dtype, "BITS": bits, "BITS_V": v_bits}
    values["GROUP"] = group_size
    grid = chosen.grid(at.queries, at.heads, at.batch)
    return at.forward(_PACKED if bits else _FORWARD, *grid, **chosen.template() | values)


def forward_inputs(at: Launcher, q: Any, *others: Any) -> list[mx.array]:
    """The inputs of the forward kernels, from a call's arrays."""
    *caches, mask, sinks = others
    v, blank = caches[len(caches) // 2 :], absent()
    # They take the strides of the others; sinks and mean have to be dense.
    seen = blank if mask is None else mx.broadcast_to(mask, at.mask_shape)
    sunk = blank if sinks is None else mx.contiguous(sinks)
    mean, (group_size, _, bits) = blank, at.packing
    if at.average:
        values = mx.dequantize(v[0], v[1], v[2], group_size, bits) if bits else v[0]
        mean = mx.contiguous(values.astype(mx.float32).mean(axis=2))
    return [q, *caches, seen, sunk, mean, *at.ends]


@cache
def absent() -> mx.array:
    """A placeholder for an absent array, evaluated so that traced functions can use it."""
    array = mx.zeros((1, 1, 1, 1, 8))
    mx.eval(array)
    return array
