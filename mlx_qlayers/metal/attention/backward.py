"""Launches the kernels of the gradients of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from typing import Any, TypeVar

import mlx.core as mx

from ...runtime.launch import Bound
from ...runtime.proof import first_proven
from ...runtime.spec import Spec
from ..common.kernels import LOG2E, strided_kernel
from .forward import Launcher, absent
from .hopper import backward_once, cut
from .layout import memory, registers
from .tensor import tensor_gradients, tensor_mask_gradient

T = TypeVar("T")
# The offset that lowers the scores of a query that sees no key, as score_tile.metal has it.
_BLANK = 1e38

_QUERIES, _MASK = (
    strided_kernel(
        name,
        "attention/backward.metal",
        threadgroup_memory=lambda **values: memory("queries", values),
        registers=lambda **values: registers("queries", values),
    )
    for name in ("attention_backward_queries", "attention_backward_mask")
)
_KEYS = strided_kernel(
    "attention_backward_keys",
    "attention/backward_keys.metal",
    threadgroup_memory=lambda **values: memory("keys", values),
    registers=lambda **values: registers("keys", values),
)

# Of lists: q, k, v, mask and sinks; the cotangents of what :func:`attention_forward` gave for them,
# of which the first counts; and that itself.
Compute = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[mx.array]]


def attention_backward(at: Launcher, tensors: bool = False) -> tuple[Compute, Compute]:
    """Binds the gradients of q, k, v (and of sinks, if any), and that of the mask, at first use."""
    blank, rows = absent(), (at.batch, at.heads, at.queries)
    out, norms = Spec((*rows, at.v_width), at.q.dtype), Spec((*rows, 2), mx.float32)
    of_query, per_query = at.layout("queries"), [out, out, norms]
    spread = of_query.grid(at.queries, at.heads, at.batch)

    @cache
    def launches() -> tuple[Bound, Bound]:
        average = (at.batch, at.kv_heads, at.v_width) if at.average else blank.shape
        if tensors:
            return _either(at, tensor_gradients, per_query, Spec(average, mx.float32))
        others = out, norms, Spec(rows, mx.float32), Spec(average, mx.float32)
        chosen, of_key = at.layout("keys"), (at.batch, at.keys, at.kv_heads)
        shapes = [(*of_key, at.width), (*of_key, at.v_width)]
        grid = chosen.grid(at.keys, at.kv_heads, at.batch)
        values = chosen.template() | {"AVERAGE": at.average, "ROLES": chosen.roles}
        keys = at.bind(_KEYS, others, *grid, shapes, **values)
        d_q = at.batch, at.queries, at.heads, at.width
        return at.bind(_QUERIES, per_query, *spread, [d_q, rows], **of_query.template()), keys

    @cache
    def launch_of_mask() -> Bound:
        if tensors:
            return _either(at, tensor_mask_gradient, per_query)
        shapes = [(*rows, at.keys)]
        return at.bind(_MASK, per_query, *spread, shapes, 0, **of_query.template())

    @cache
    def once() -> Callable[..., list[mx.array]] | None:
        best = None if tensors else cut("backward", at)
        return backward_once(at, best) if best else None

    def inputs(arrays: Sequence[Any]) -> list[mx.array]:
        q, k, v, mask, _ = arrays
        return [q, k, v, blank if mask is None else mx.broadcast_to(mask, at.mask_shape)]

    def of_all(
        arrays: Sequence[Any], cotangents: Sequence[Any], outputs: Sequence[Any]
    ) -> list[mx.array]:
        sinks, (out, norms), d_out = arrays[4], outputs, cotangents[0]
        given, average = inputs(arrays), _average(at, norms, d_out) if at.average else blank
        if run := once():
            d_q, d_k, d_v, delta = run(given, out, d_out, norms, average)
        else:
            queries, keys = launches()
            d_q, delta = queries([*given, out, d_out, norms, *at.ends])
            d_k, d_v = keys([*given, d_out, norms, delta, average, *at.ends])
        gradients = [a.swapaxes(1, 2) for a in (d_q, d_k, d_v)]
        return gradients if sinks is None else [*gradients, _of_sinks(sinks, norms, delta)]

    def of_mask(
        arrays: Sequence[Any], cotangents: Sequence[Any], outputs: Sequence[Any]
    ) -> list[mx.array]:
        out, norms = outputs
        (d_scores,) = launch_of_mask()([*inputs(arrays), out, cotangents[0], norms, *at.ends])
        return [_of_mask(arrays[3], d_scores)]

    return of_all, of_mask


def _of_mask(mask: mx.array, d_scores: mx.array) -> mx.array:
    """The gradient of a mask that was broadcast to the scores, (B, H, L, S)."""
    shared = [i for i, n in enumerate((1,) * (4 - mask.ndim) + mask.shape) if n == 1]
    gradient = d_scores.sum(axis=shared, keepdims=True).reshape(mask.shape)
    return gradient.astype(mask.dtype)


def _either(at: Launcher, bind: Callable[..., T], *others: Any) -> T:
    """Binds tensor operations as the forward pass, or the other kind if their proof failed."""
    other = copy(at)
    other.handed = not at.handed
    kinds = ("handed over", at), ("through memory", other)
    return first_proven({f"scores {kind}": partial(bind, a, *others) for kind, a in kinds})


def _average(at: Launcher, norms: mx.array, d_out: mx.array) -> mx.array:
    """The gradient that each value gets from queries that see no key: (B, Hkv, Dv)."""
    share = mx.where(norms[..., :1] == _BLANK, 1 / at.keys, 0.0)
    shared = (d_out.astype(mx.float32) * share).sum(axis=2)
    return mx.contiguous(shared.reshape(at.batch, at.kv_heads, -1, at.v_width).sum(axis=2))


def _of_sinks(sinks: mx.array, norms: mx.array, delta: mx.array) -> mx.array:
    """The gradient of ``sinks``, (H,) in their dtype."""
    top, total = norms[..., 0], norms[..., 1]
    weight = mx.power(2, LOG2E * sinks.astype(mx.float32)[:, None] - top) / total
    return -(weight * delta).sum(axis=(0, 2)).astype(sinks.dtype)
