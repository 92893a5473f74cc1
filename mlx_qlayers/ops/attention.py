"""Scaled dot-product attention: grouped heads, masks, windows, softcap, sinks, packed keys."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from ..dispatch import Choice, Gradient, Operation, Plan, choose, dispatch
from ..dispatch import gradient_of as autodiff
from ..dispatch.measurements import configure, decided, found
from ..measurements.thresholds import Measured, threshold
from ..metal.attention import decode
from ..metal.attention.backward import attention_backward
from ..metal.attention.forward import Launcher, attention_forward
from ..metal.attention.hopper import cut, forward_ahead
from ..metal.attention.layout import WIDEST, WIDEST_FORWARD
from ..metal.attention.tensor import attention_tensor, why_no_tensors
from ..options import AttentionCall, RotatedRows, Scores
from ..reference import attention as reference
from ..reference.attention import Run
from ..reference.hadamard import rotated_heads
from ..runtime.backend import backend, current, requested
from ..runtime.devices import device_of
from ..runtime.program import CONSTANT_BELOW
from ..runtime.proof import first_proven
from ..runtime.transformed import is_differentiated
from .attention_checks import checked
from .attention_choice import (
    FEW_QUERIES,
    MOST_SCORES,
    STOCK_ON_APPLE,
    decode_host_gain,
    fills_memory,
    gradients_by_kernels,
    takes_decode,
    why_no_kernel,
    why_not_decode,
    why_not_forward,
)
from .attention_invariant import plan_invariant, with_casts
from .tensor_choice import MEMORY, PATHS, by_tensors, in_turn, measured_beside

# Bytes of dense keys and values of one layer that may be made of packed ones.
_MOST_DENSE = 128 << 20
# The kernel without tensor operations.
_MANY = "many queries"


def attention(
    q: mx.array,
    k: mx.array | tuple[mx.array, mx.array, mx.array],
    v: mx.array | tuple[mx.array, mx.array, mx.array],
    *,
    scale: float,
    mask: mx.array | str | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    deterministic: bool = False,
) -> mx.array:
    """``softmax(q @ k.T * scale) @ v`` for every head, with a float32 softmax.

    Args:
        q: queries (B, H, L, D); float32, float16 or bfloat16.
        k: keys (B, Hkv, S, D), floating point, where Hkv divides H and is not expanded; or what
            ``mx.quantize(k)`` gives, (packed, scales, biases), as mlx-lm's ``QuantizedKVCache``
            keeps it: group size and bits follow from the shapes.
        v: values (B, Hkv, S, Dv), or packed with the group size of ``k``, in any number of bits.
        scale: what the products of queries and keys are multiplied by.
        mask: ``"causal"`` (the last query is aligned with the last key), booleans (true where a
            query sees a key) or numbers to add to the scores; arrays broadcast to (B, H, L, S).
        window: query i, counted so that the last of both are aligned, sees keys j with
            ``i - window < j <= i``, of those that ``mask`` lets it see.
        softcap: a score s becomes ``softcap * tanh(s / softcap)``, before the mask.
        sinks: (H,), floating point: scores of keys without a value, one a head, outside mask
            and softcap.
        deterministic: make the gradients bit-identical from run to run. Only on NVIDIA GPUs can
            they differ otherwise, where long ones are added up by atomics.

    Returns:
        (B, H, L, Dv) in the dtype that those of ``q``, ``k`` and ``v`` promote to. A query that
        sees no key gets the mean of all values (as the stock operator on a CPU), or zero where
        there are sinks; never NaN.

    Raises:
        ValueError: an argument has the wrong rank, shape, dtype or value; it says which.

    Example:
        >>> q, k = mx.ones((1, 4, 3, 32)), mx.ones((1, 2, 5, 32))
        >>> attention(q, k, k, scale=32**-0.5, mask="causal").shape
        (1, 4, 3, 32)

    Source:
        ``mx.fast.scaled_dot_product_attention``; windows as in mlx-lm, softcap as in Gemma 2 (arXiv
        2408.00118), sinks as in gpt-oss (arXiv 2508.10925).
    """
    seen, rule = (mask, None) if isinstance(mask, mx.array) else (None, mask)
    if type(k) is type(v) is mx.array:
        static = (0, 0), scale, rule, window, softcap, deterministic
        return dispatch(ATTENTION, (q, k, v, seen, sinks), static)[0]
    if isinstance(k, RotatedRows):
        given: Any = (rotated_heads(q), tuple(k), tuple(v))
        options: Any = {"scale": scale, "mask": mask, "window": window, "softcap": softcap}
        return rotated_heads(attention(*given, **options, sinks=sinks))
    many = tuple, list
    of_k: Any = k if isinstance(k, many) and k else (k,)
    of_v: Any = v if isinstance(v, many) and v else (v,)
    counts = len(of_k) * (of_k is k), len(of_v) * (of_v is v)
    static = counts, scale, rule, window, softcap, deterministic
    return dispatch(ATTENTION, (q, *of_k, *of_v, seen, sinks), static)[0]


def _plan(arrays: Sequence[Any], *static: Any) -> Plan:
    call = checked(arrays, *static)
    common = mx.result_type(*call.dtypes)
    if any(dtype != common for dtype in call.dtypes):
        return Plan(None, with_casts(ATTENTION, static, common, len(arrays) - 2))
    if current.get().invariant:
        return plan_invariant(call)
    decoding = takes_decode(call)
    many = call.packing[1] > 0 and call.q.shape[2] > FEW_QUERIES
    if many and device_of().gpu:
        # Never stock operators, which would keep all scores in memory.
        return _plan_packed(call, static)
    choice = choose_decode(call) if decoding else _choose_forward(call)
    if 0 in (shape := (*call.q.shape[:3], call.v_width)):
        return Plan(choice, lambda *_: [mx.zeros(shape, common)])
    composed = reference.attention(call)
    if choice.path == "reference":
        if _is_too_much(call):
            return _plan_wide(call, static, choice)
        # The masks of windows are other than the reference's, which somebody asked for.
        takes_stock = call.scores.window is None or requested() == "auto"
        run = (takes_stock and reference.stock(call)) or composed
        if not decoding and gradients_by_kernels(call):
            again = _by_kernels(call)  # which is faster with its gradient
            return Plan(choice, lambda *given: (again if is_differentiated() else run)(*given))
        if device_of().measured or decoding or why_no_kernel(call) or not fills_memory(call):
            return Plan(choice, run)
        # The kernels' gradient computes the forward pass again.
        return Plan(choice, run, autodiff(_by_kernels(call), arrays), composed)
    if decoding:
        config = configure("attention_decode", choice.path, *decode.key_of(call))
        launch = decode.attention_decode(call, config)
        # The gradient is that of kernels of many queries if kernels were asked for.
        by_stock = requested() == "auto" or why_no_kernel(call)
        again = composed if by_stock else _by_kernels(call)
        return Plan(choice, launch, autodiff(again, arrays), composed)
    if call.packing[1]:
        return _plan_packed(call, static)
    return _by_forward(choice, call)._replace(reference=composed)


def _plan_packed(call: AttentionCall, static: tuple[Any, ...]) -> Plan:
    """Packed keys and values as they are, or dense ones of this layer, or of some of its heads."""
    batch, heads, keys, _ = call.k[0].shape
    size = batch * heads * keys * (call.q.shape[3] + call.v_width) * call.q.dtype.size
    large, many = size > _MOST_DENSE, max(batch, heads) > 1
    bits, groups = {*call.packing[1:]}, min(parts[1].size for parts in (call.k, call.v))
    covered = bits <= {*decode.BITS} and groups >= CONSTANT_BELOW and why_no_kernel(call) is None
    reason, best = None, None
    if covered and requested() == "auto":
        # Each tile of queries unpacks keys anew: on an H200 that took 2.3 times as long.
        why = "dense keys of a layer are faster" if many or not large else None
        best = found("attention_forward", *Launcher(call).key())
        reason = decided(best, why)
    if not covered or reason:
        if large and many:
            return Plan(None, _in_halves(call, int(heads > 1), ATTENTION, static))
        return Plan(None, _unpacked(call, ATTENTION, ((0, 0), *static[1:])))
    choice = choose("attention", by="many queries of packed keys", best=best)
    return _by_forward(choice, call)


def _unpacked(call: AttentionCall, operation: Operation, static: tuple[Hashable, ...]) -> Run:
    """An operation on keys and values that were packed."""
    size, bits, v_bits = call.packing
    dequantize: Any = mx.dequantize

    def run(q: mx.array, *rest: Any) -> list[mx.array]:
        k, v = dequantize(*rest[:3], size, bits), dequantize(*rest[3:6], size, v_bits)
        return dispatch(operation, (q, k, v, *rest[6:]), static)

    return run


def _is_too_much(call: AttentionCall) -> bool:
    """Whether stock operators would keep more scores in memory than there need be at a time."""
    (*_, queries, width), keys, scores = call.q.shape, call.k[0].shape[2], call.scores
    if not device_of().gpu or call.packing[1]:
        return False
    on_apple = width == call.v_width and width in STOCK_ON_APPLE
    widest = threshold("attention_forward_widest")
    fused = on_apple if widest is None else max(width, call.v_width) <= widest
    if (fused and scores.softcap is None) or queries <= FEW_QUERIES or queries > keys:
        return False
    # A window is counted from the last key, of which a mask has as many as there are.
    counted = scores.window is None or call.mask is None
    return counted and prod(call.q.shape[:3]) * keys > MOST_SCORES


def _plan_wide(call: AttentionCall, static: tuple[Any, ...], choice: Choice) -> Plan:
    """The forward kernel where MLX would run ahead of what is in turn, and keep it all."""
    turns, arrays = _in_turn(call, static), (call.q, *call.k, *call.v, call.mask, call.sinks)
    wide = max(call.q.shape[3], call.v_width) > WIDEST and call.q.dtype.size == 2
    most = threshold("attention_in_turn_most")
    many = most is not None and prod(call.q.shape[:3]) * call.k[0].shape[2] >= most
    if not (wide and many) or why_no_kernel(call, WIDEST_FORWARD):
        return Plan(choice, turns)
    launch = attention_forward(Launcher(call))
    choice = choose("attention", reason=Measured(""), by="many queries of wide heads")
    return Plan(choice, lambda *given: launch(*given)[:1], autodiff(turns, arrays), turns)


def _in_turn(call: AttentionCall, static: tuple[Any, ...]) -> Run:
    """Some queries after the others, each with the keys that they may see."""
    (batch, heads, queries, _), keys, scores = call.q.shape, call.k[0].shape[2], call.scores
    rows, bounded = MOST_SCORES // (batch * heads * keys) or 1, scores.causal or scores.window

    def run(q: mx.array, k: mx.array, v: mx.array, mask: Any, sinks: Any) -> list[mx.array]:
        parts = []
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            end = keys - queries + last if bounded else keys
            seen = (
                mask
                if mask is None or mask.ndim < 2 or mask.shape[-2] == 1
                else mask[..., first:last, :]
            )
            arrays = q[:, :, first:last], k[:, :, :end], v[:, :, :end], seen, sinks
            parts += dispatch(ATTENTION, arrays, static)
        return [mx.concatenate(parts, axis=2)]

    return run


def choose_decode(call: AttentionCall) -> Choice:
    best = found("attention_decode", *decode.key_of(call))
    return choose(
        "attention",
        reason=why_not_decode(call),
        host_gain=decode_host_gain(call),
        by="few queries" if best else "",
        best=best,
    )


def _by_kernels(call: AttentionCall) -> Run:
    """The kernels of many queries, which have a gradient, without a choice."""
    if call.packing[1]:
        by_kernels = _unpacked(call, _FORWARD, call.scores)
        return lambda *arrays: by_kernels(*arrays)[:1]
    return lambda *arrays: dispatch(_FORWARD, arrays, call.scores)[:1]


def _choose_forward(call: AttentionCall) -> Choice:
    lacking, best = why_no_kernel(call), dict[str, Any]()
    if current.get().sparing and not lacking and device_of().launches_at_once:
        return Choice("attention", backend(), "the gradients of MLX's operators keep all scores")
    if not (device_of().measured or lacking):
        key = Launcher(call).key()
        best = measured_beside(found("attention_forward", *key), _MANY)
    return choose(
        "attention",
        not lacking,
        reason=lacking or why_not_forward(call),
        host_gain=threshold("attention_forward_gain", device="host"),
        **best,
    )


def _plan_forward(arrays: Sequence[Any], *scores: Any) -> Plan:
    q, *caches, mask, sinks = arrays
    k, v = caches[: len(caches) // 2], caches[len(caches) // 2 :]
    call = AttentionCall(q, tuple(k), tuple(v), Scores(*scores), mask, sinks)
    composed = reference.attention(call)
    if requested() == "reference":
        return Plan(None, composed)
    return _by_forward(None, call)._replace(reference=composed)


def _by_forward(choice: Choice | None, call: AttentionCall) -> Plan:
    """The kernels of many queries; what they give besides the result is for the gradients.

    The gradient of an additive mask, the only one as large as the scores, is one of its own.
    """
    q, keys, (_, causal, window, *_) = call.q, call.k[0].shape[2], call.scores
    seen = min(keys, window or keys) / (2 if causal and window is None else 1)
    # The longest launch is that of the gradients of keys and values: four products.
    operations = 4.0 * prod(q.shape[:3]) * seen * (q.shape[3] + call.v_width)
    if operations > device_of().most_operations:
        axis = 1 if call.k[0].shape[1] > 1 else 0
        if call.k[0].shape[axis] > 1:
            return Plan(choice, _in_halves(call, axis, _FORWARD, call.scores))
    at = Launcher(call)
    if call.packing[1]:
        chosen = configure("attention_forward", at.device, *at.key())
        arrays = call.q, *call.k, *call.v, call.mask, call.sinks
        dense = autodiff(_unpacked(call, _FORWARD, call.scores), arrays)
        return Plan(choice, attention_forward(at, chosen), dense)
    best = found("attention_forward", *at.key()) if not device_of(at.device).measured else None
    kernels = [_MANY]
    if best is not None and by_tensors(best) and why_no_tensors(at) is None:
        kernels = in_turn(best, {"kernel": _MANY, **PATHS})
    return first_proven({kernel: partial(_by_kernel, kernel, choice, call) for kernel in kernels})


def _by_kernel(kernel: str, choice: Choice | None, call: AttentionCall) -> Plan:
    """One of the kernels of many queries, and its gradients."""
    at, tensors = Launcher(call, kernel != MEMORY), kernel != _MANY
    of_all, of_mask = attention_backward(at, tensors)
    gradients = [Gradient((0, 1, 2) if call.sinks is None else (0, 1, 2, 4), of_all)]
    if call.mask is not None and call.mask.dtype != mx.bool_:
        gradients.append(Gradient((3,), of_mask))
    if tensors:
        return Plan(choice, attention_tensor(at), gradients)
    if best_cut := cut("forward", at):
        return Plan(choice, forward_ahead(at, best_cut), gradients)
    chosen = configure("attention_forward", at.device, *at.key())
    return Plan(choice, attention_forward(at, chosen), gradients)


def _in_halves(
    call: AttentionCall, axis: int, operation: Operation, static: tuple[Any, ...]
) -> Run:
    """The same in two parts of the heads (axis 1) or of the batch (axis 0)."""
    whole = call.k[0].shape[axis]

    def halves(a: mx.array | None, at: int = axis) -> Sequence[mx.array | None]:
        if a is None or at < 0 or a.shape[at] == 1:
            return a, a  # it is shared
        return a.split((whole // 2 * a.shape[at] // whole,), at)

    def run(*arrays: Any) -> list[mx.array]:
        *inputs, mask, sinks = arrays
        of_mask = halves(mask, axis - 4 + (0 if mask is None else mask.ndim))
        of_sinks = halves(sinks, axis - 1)
        parts = zip(*map(halves, inputs), of_mask, of_sinks, strict=True)
        made = [dispatch(operation, each, static) for each in parts]
        return [mx.concatenate(list(pair), axis) for pair in zip(*made, strict=True)]

    return run


def _norms(
    outputs: list[mx.array], arrays: Sequence[Any], *static: Any
) -> tuple[list[mx.array], list[mx.array]]:
    """For a proof: the logarithms of the sums of weights, that gradients go by."""
    if len(outputs) == 1:
        return [], []
    (_, norms), call = outputs, checked(arrays, *static)
    (expected,) = reference.attention(call, reference.log_sums)(*arrays)
    found = norms[..., :1] + mx.log2(norms[..., 1:])
    # Of a query that sees no key neither is a number.
    here = mx.abs(expected) < 1e30
    return [mx.where(here, found, 0)], [mx.where(here, expected, 0)]


def _plan_rows(arrays: Sequence[Any], scale: float, causal: bool) -> Plan:
    """Of q, k and v with R rows, None, sinks and held (1,) int32: how many of the R rows count.

    A slice of these rows would be another call with another plan for each count.
    """
    *most, held = arrays
    if held.shape != (1,) or held.dtype != mx.int32:
        raise ValueError(f"held must be int32 (1,), not {held.dtype} {held.shape}")
    rule = "causal" if causal else None
    call = checked(most, (0, 0), scale, rule, None, None)

    def composed(q: Any, k: Any, v: Any, mask: None, sinks: Any, held: mx.array) -> list[mx.array]:
        k, v = (each[:, :, : held.item()] for each in (k, v))
        return [attention(q, k, v, scale=scale, mask=rule, sinks=sinks)]

    choice = choose_decode(call) if len({*call.dtypes}) == 1 and takes_decode(call) else None
    # A CPU's kernel takes a count.
    if choice is None or not device_of(choice.path).launches_at_once:
        return Plan(None, composed)
    config = configure("attention_decode", choice.path, *decode.key_of(call))
    return Plan(choice, decode.attention_decode(call, config, counted=True), reference=composed)


ATTENTION = Operation("attention", _plan, compiled=True, besides=_norms)
# Of few tokens to the rows of a buffer that count, by one plan for all counts.
ATTENTION_ROWS = Operation("attention", _plan_rows)
# Many queries by kernels, without a choice: where their gradient is that of another kernel.
_FORWARD = Operation("attention", _plan_forward)
