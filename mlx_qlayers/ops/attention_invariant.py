"""Attention by which a query gets the same bits whatever else a call has: rows, batch, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import Choice, Operation, Plan, choose, dispatch
from ..metal.attention import decode
from ..options import AttentionCall
from ..reference import attention as reference
from ..reference.attention import Run
from ..runtime.backend import current
from ..runtime.devices import device_of
from ..runtime.program import CONSTANT_BELOW
from ..runtime.spec import Spec
from .attention_checks import checked
from .attention_choice import takes_decode

# Bytes of sums of splits that one launch may write, of many queries.
_PARTS = 64 << 20


def attention_from(
    starts: mx.array,
    q: mx.array,
    k: mx.array | tuple[mx.array, ...],
    v: mx.array | tuple[mx.array, ...],
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """:func:`.attention.attention` on a GPU, where sequences begin at such keys: (B,) int32.

    Keys are added up in splits that are counted from there, so the mask has to hide all before.
    """
    starts = mx.pad(starts, (0, max(0, CONSTANT_BELOW - starts.size)))
    seen, rule = (mask, None) if isinstance(mask, mx.array) else (None, mask)
    counts = (0, 0) if isinstance(k, mx.array) else (len(k), len(v))
    of_k, of_v = ((each,) if isinstance(each, mx.array) else each for each in (k, v))
    arrays = q, *of_k, *of_v, seen, sinks, starts
    out: mx.array = dispatch(ATTENTION_FROM, arrays, (counts, scale, rule))[0]
    return out


def _plan(arrays: Sequence[Any], counts: tuple[int, int], scale: float, rule: str | None) -> Plan:
    *most, _ = arrays
    call = checked(most, counts, scale, rule, None, None)
    common = mx.result_type(*call.dtypes)
    if any(dtype != common for dtype in call.dtypes):
        count = 1 + len(call.k) + len(call.v)
        return Plan(None, with_casts(ATTENTION_FROM, (counts, scale, rule), common, count))
    composed = reference.attention(call)
    if not current.get().invariant:  # the truth for a proof
        return Plan(None, lambda *given: composed(*given[:-1]))
    return plan_invariant(call, counted=True)


def with_casts(operation: Operation, static: tuple[Any, ...], common: mx.Dtype, count: int) -> Run:
    """The operation in the dtype that those of q, k and v, its first arrays, promote to."""

    def run(*arrays: Any) -> list[mx.array]:
        cast = [a if a.dtype == mx.uint32 else a.astype(common) for a in arrays[:count]]
        return dispatch(operation, (*cast, *arrays[count:]), static)

    return run


def plan_invariant(call: AttentionCall, counted: bool = False) -> Plan:
    """One kernel for all numbers of rows; ``counted``: a call has starts behind its arrays.

    On a CPU keys are added up one by one, in their order, so that hidden ones change no bit.

    Raises:
        ValueError: no such kernel takes the call.
    """
    q, shape = call.q, call.q.shape
    single = call._replace(q=Spec((*shape[:2], 1, shape[3]), q.dtype))
    choice = choose("attention", by="one kernel for all numbers of rows")
    taken = choice.path != "reference" and takes_decode(single) and q.size > 0
    on_gpu = taken and device_of(choice.path).gpu
    additive = call.mask is not None and call.mask.dtype != mx.bool_
    if not taken or (on_gpu and (additive or call.scores.window is not None)):
        what = f"{call.mask.dtype} mask" if additive and call.mask else f"{shape}"
        raise ValueError(
            f"batch-invariant attention takes no {what} on {choice.path} ({choice.reason})"
        )
    if on_gpu:
        return _plan_fixed(choice, call, counted)
    return Plan(choice, decode.attention_decode(call, decode.Serial(max_rows=8, block=1)))


def _plan_fixed(choice: Choice, call: AttentionCall, counted: bool) -> Plan:
    """A launch for some queries, and then for others; always with a mask, which the text reads."""
    (batch, heads, queries, _), keys = call.q.shape, call.k[0].shape[2]
    config, count = decode.fixed(choice.path, call), 1 + len(call.k) + len(call.v)
    row = 4 * batch * heads * config.splits(keys) * (call.v_width + 2)
    rows, causal = max(1, _PARTS // row), call.scores.causal and call.mask is None
    parts = [(i, min(i + rows, queries)) for i in range(0, queries, rows)]
    launches = [_bind(call, config, last - first, keys) for first, last in parts]

    def run(*arrays: Any) -> list[mx.array]:
        q, *cached = arrays[:count]
        mask, sinks = arrays[count : count + 2]
        starts = arrays[-1] if counted else mx.zeros((max(batch, CONSTANT_BELOW),), mx.int32)
        if mask is None:
            at = mx.arange(keys - queries, keys)[:, None] if causal else keys
            mask = mx.broadcast_to(mx.arange(keys) <= at, (queries, keys))
        many = mask.ndim > 1 and mask.shape[-2] > 1
        found = [
            launch(q[:, :, i:j], *cached, mask[..., i:j, :] if many else mask, sinks, starts)[0]
            for launch, (i, j) in zip(launches, parts, strict=True)
        ]
        return [found[0] if len(found) == 1 else mx.concatenate(found, axis=2)]

    return Plan(choice, run, (), reference.attention(call))


def _bind(call: AttentionCall, config: decode.Fixed, queries: int, keys: int) -> Any:
    q = Spec((*call.q.shape[:2], queries, call.q.shape[3]), call.q.dtype)
    scores = call.scores._replace(causal=False)
    seen = call._replace(q=q, scores=scores, mask=Spec((queries, keys), mx.bool_))
    return decode.attention_decode(seen, config, counted=True)


ATTENTION_FROM = Operation("attention", _plan)
