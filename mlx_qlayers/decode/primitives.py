"""How each primitive of MLX is called: one table.

An entry has a function of arrays and further arguments, and what makes those of a node's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..dispatch import Operation
from .graph import Node, number_of
from .twin import FIRST_GROUP, GROUPS

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


class Call(NamedTuple):
    """A call of a primitive.

    Attributes:
        function: of its arrays and what ``more`` gives.
        more: further arguments, made of those of the node once they are numbers.
        shaped: whether ``more`` takes the shape of the node instead.
    """

    function: Callable[..., Any]
    more: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda arg: ()
    shaped: bool = False


class Dispatched(NamedTuple):
    """An operation of this package, of the arrays of a node in turn.

    Attributes:
        operation: what is dispatched.
        static: its other arguments.
        listed: whether it gives a list of arrays, also of one.
    """

    operation: Operation
    static: tuple[Any, ...]
    listed: bool = True


# What makes a call of a node, or a call if that depends on no arguments but those of ``more``.
Entry = Call | Callable[[Node], Call]


def _as_they_are(arg: tuple[Any, ...]) -> tuple[Any, ...]:
    return arg


def _whole(arg: tuple[Any, ...]) -> tuple[Any, ...]:
    return (arg,)


def _in_one(arg: tuple[Any, ...]) -> tuple[Any, ...]:
    return (arg[0],)


def _slices(start: Sequence[int], stop: Sequence[int], step: Sequence[int]) -> tuple[slice, ...]:
    return tuple(map(slice, start, stop, step))


def _slice_update(node: Node) -> Call:
    kind, *_, strides = node.arg
    if kind != 4 or {*strides} != {1}:
        raise KeyError("SliceUpdate")
    axes = tuple(range(len(strides)))
    return Call(partial(_at, axes), lambda arg: (mx.array(arg[1], mx.int32),))


def _at(axes: tuple[int, ...], x: mx.array, update: mx.array, start: mx.array) -> mx.array:
    return mx.slice_update(x, update, start, axes)


def _slice_update_at(node: Node) -> Call:
    return Call(partial(_at, node.arg))


def _slice_at(node: Node) -> Call:
    axes, _ = node.arg
    return Call(lambda x, start, sizes: mx.slice(x, start, axes, sizes), lambda arg: (arg[1],))


def _positions(node: Node) -> Call:
    """Numbers that depend on positions, of the array that has all of those."""
    places = [each for _, each in node.arg]

    def moved(positions: mx.array, const: Any, terms: tuple[tuple[int, int], ...]) -> mx.array:
        total = None if isinstance(const, int) and not const else mx.array(const, node.dtype)
        for index, count in terms:
            one = positions[index].astype(node.dtype)
            one = one if count == 1 else count * one
            total = one if total is None else one + total
        return mx.array(0, node.dtype) if total is None else total

    def at(positions: mx.array, *numbers: Any) -> mx.array:
        if all(each == places[0] for each in places):
            found = moved(positions, [*numbers] if len(numbers) > 1 else numbers[0], places[0])
        else:
            found = mx.stack(list(map(partial(moved, positions), numbers, places)))
        return found.reshape(node.shape)

    return Call(at, lambda arg: tuple(number for number, _ in arg))


def _gather(node: Node) -> Call:
    axes, sizes = node.arg
    source = node.src[0]
    assert source is not None
    whole = all(n == (1 if i in axes else source.shape[i]) for i, n in enumerate(sizes))
    if axes != tuple(range(len(axes))) or not whole:
        raise KeyError("Gather")
    return Call(_rows, _whole, shaped=True)


def _rows(x: mx.array, *rest: Any) -> mx.array:
    *indices, shape = rest
    y = mx.take(x, indices[0], axis=0) if len(indices) == 1 else x[tuple(indices)]
    return y.reshape(shape)


def _depends(node: Node) -> Call:
    """The first array; or its sum over ranks, see :mod:`.twin`."""
    number = number_of(node.src[-1]) if node.src[-1] is not None else None
    if not isinstance(number, int) or not 0 <= number - FIRST_GROUP < len(GROUPS):
        return Call(lambda x, *rest: x)
    group = GROUPS[number - FIRST_GROUP]
    return Call(lambda x, _: mx.distributed.all_sum(x, group=group))


def _reduce(node: Node) -> Call:
    kind, axes = node.arg
    function = (mx.all, mx.any, mx.sum, mx.prod, mx.min, mx.max)[kind]
    return Call(partial(function, axis=axes, keepdims=True))


def _arg_reduce(node: Node) -> Call:
    kind, axis = node.arg
    return Call(partial((mx.argmin, mx.argmax)[kind], axis=axis, keepdims=True))


def _scan(node: Node) -> Call:
    kind, axis, reverse, inclusive = node.arg
    function = (mx.cummax, mx.cummin, mx.cumsum, mx.cumprod, mx.logcumsumexp)[kind]
    return Call(partial(function, axis=axis, reverse=reverse, inclusive=inclusive))


def _convolution(node: Node) -> Call:
    *lists, groups, flip = node.arg
    stride, low, high, kernel, inputs = ([*each] for each in lists)
    more: dict[str, Any] = {"kernel_dilation": kernel, "input_dilation": inputs}
    more |= {"stride": stride, "padding": (low, high), "groups": groups, "flip": flip}
    return Call(partial(mx.conv_general, **more))


def _quantized(node: Node) -> Call:
    size, bits, mode, transpose = node.arg
    more = {"group_size": size, "bits": bits, "mode": MODES[mode], "transpose": transpose}
    return Call(partial(mx.quantized_matmul, **more))


def _gather_qmm(node: Node) -> Call:
    size, bits, mode, transpose, *is_sorted = node.arg
    more = {"group_size": size, "bits": bits, "mode": MODES[mode], "transpose": transpose}
    function: Any = partial(mx.gather_qmm, **more, sorted_indices=any(is_sorted))
    affine = mode == 0

    def call(x: mx.array, w: mx.array, scales: mx.array, *rest: mx.array) -> mx.array:
        biases, lhs, rhs = rest if affine else (None, *rest)
        return function(x, w, scales, biases, lhs, rhs)

    return Call(call)


def _quantize(node: Node) -> Call:
    size, bits, mode, dequantize = node.arg
    more = {"group_size": size, "bits": bits, "mode": MODES[mode]}
    return Call(partial(mx.dequantize if dequantize else mx.quantize, **more))


def _rope(node: Node) -> Call:
    dims, traditional, base, scale, _ = node.arg
    by_freqs = len(node.src) > 2

    def call(x: mx.array, offset: mx.array, freqs: mx.array | None = None) -> mx.array:
        own = None if by_freqs else base
        return mx.fast.rope(
            x, dims, traditional=traditional, base=own, scale=scale, offset=offset, freqs=freqs
        )

    return Call(call)


def _attention(node: Node) -> Call:
    scale, causal, has_sinks, *_ = node.arg
    masked = len(node.src) > 3 + has_sinks

    def call(q: mx.array, k: mx.array, v: mx.array, *rest: mx.array) -> mx.array:
        mask: Any = rest[0] if masked else "causal" if causal else None
        sinks = rest[-1] if has_sinks else None
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    return Call(call)


def _norm(node: Node) -> Call:
    weight = node.src[1]
    if weight is None or weight.shape:
        return Call(mx.fast.rms_norm, _as_they_are)
    return Call(lambda x, _, eps: mx.fast.rms_norm(x, None, eps), _as_they_are)


def _layer_norm(node: Node) -> Call:
    (eps,) = node.arg

    def call(x: mx.array, weight: mx.array | None, bias: mx.array | None) -> mx.array:
        scale, shift = (a if a is not None and a.ndim else None for a in (weight, bias))
        return mx.fast.layer_norm(x, scale, shift, eps)

    return Call(call)


def _log(node: Node) -> Call:
    return Call((mx.log2, mx.log10, mx.log)[node.arg[0]])


def _softmax(node: Node) -> Call:
    return Call(partial(mx.softmax, axis=-1, precise=node.arg[0]))


def _scatter_axis(node: Node) -> Call:
    kind, axis = node.arg
    if kind != 1:
        raise KeyError("ScatterAxis")
    return Call(partial(mx.put_along_axis, axis=axis))


def _pad(node: Node) -> Call:
    count = len(node.shape)

    def widths(arg: tuple[Any, ...]) -> tuple[Any, ...]:
        found = [(0, 0)] * count
        for axis, before, behind in zip(*arg, strict=True):
            found[axis] = before, behind
        return (found,)

    return Call(lambda x, value, found: mx.pad(x, found, constant_values=value), widths)


def _joined(node: Node) -> Call:
    axis = node.arg[0]
    return Call(lambda *arrays: mx.concatenate([*arrays], axis))


def _matmul_added(node: Node) -> Call:
    alpha, beta = node.arg
    return Call(lambda a, b, c: mx.addmm(c, a, b, alpha, beta))


def _cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    return x.astype(dtype)


def _first(x: mx.array, *rest: mx.array) -> mx.array:
    return x


_PLAIN: dict[str, Any] = {
    "Abs": mx.abs,
    "Add": mx.add,
    "Ceil": mx.ceil,
    "Cos": mx.cos,
    "Divide": mx.divide,
    "Equal": mx.equal,
    "Erf": mx.erf,
    "Exp": mx.exp,
    "Expm1": mx.expm1,
    "Floor": mx.floor,
    "FloorDivide": mx.floor_divide,
    "Greater": mx.greater,
    "GreaterEqual": mx.greater_equal,
    "Less": mx.less,
    "LessEqual": mx.less_equal,
    "Log1p": mx.log1p,
    "LogAddExp": mx.logaddexp,
    "LogicalAnd": mx.logical_and,
    "LogicalNot": mx.logical_not,
    "LogicalOr": mx.logical_or,
    "Matmul": mx.matmul,
    "Maximum": mx.maximum,
    "Minimum": mx.minimum,
    "Multiply": mx.multiply,
    "Negative": mx.negative,
    "NotEqual": mx.not_equal,
    "Power": mx.power,
    "Remainder": mx.remainder,
    "Round": mx.round,
    "Select": mx.where,
    "Sigmoid": mx.sigmoid,
    "Sign": mx.sign,
    "Sin": mx.sin,
    "Square": mx.square,
    "StopGradient": mx.stop_gradient,
    "Subtract": mx.subtract,
    "Tanh": mx.tanh,
    "Copy": _first,
}
_BITS = (mx.bitwise_and, mx.bitwise_or, mx.bitwise_xor, mx.left_shift, mx.right_shift)

CALLS: dict[str, Entry] = {
    **{name: Call(function) for name, function in _PLAIN.items()},
    "AddMM": _matmul_added,
    "Arange": lambda node: Call(partial(mx.arange, dtype=node.dtype), lambda arg: arg),
    "At": _positions,
    "ArgPartition": Call(mx.argpartition, _as_they_are),
    "ArgReduce": _arg_reduce,
    "ArgSort": lambda node: Call(partial(mx.argsort, axis=node.arg[0])),
    "AsType": Call(_cast, _as_they_are),
    "BitwiseBinary": lambda node: Call(_BITS[node.arg[0]]),
    "Broadcast": Call(mx.broadcast_to, _in_one),
    "Concatenate": _joined,
    "Convolution": _convolution,
    "ExpandDims": Call(mx.expand_dims, _in_one),
    "Flatten": Call(mx.flatten, _as_they_are),
    "Full": Call(mx.broadcast_to, _whole, shaped=True),
    "Gather": _gather,
    "GatherAxis": lambda node: Call(partial(mx.take_along_axis, axis=node.arg[0])),
    "GatherMM": lambda node: Call(
        lambda a, b, left, right: mx.gather_mm(a, b, left, right, sorted_indices=any(node.arg))
    ),
    "GatherQMM": _gather_qmm,
    "LayerNorm": _layer_norm,
    "Log": _log,
    "LogSumExp": Call(partial(mx.logsumexp, axis=-1, keepdims=True)),
    "Numbers": lambda node: Call(
        lambda numbers: mx.array(numbers, node.dtype).reshape(node.shape), _whole
    ),
    "Pad": _pad,
    "Partition": Call(mx.partition, _as_they_are),
    "Quantize": _quantize,
    "QuantizedMatmul": _quantized,
    "RMSNorm": _norm,
    "Depends": _depends,
    "Reduce": _reduce,
    "Reshape": Call(mx.reshape, _in_one),
    "RoPE": _rope,
    "ScaledDotProductAttention": _attention,
    "Scan": _scan,
    "ScatterAxis": _scatter_axis,
    "Slice": Call(operator.getitem, lambda arg: (_slices(*arg),)),
    "SliceAt": _slice_at,
    "SliceUpdate": _slice_update,
    "SliceUpdateAt": _slice_update_at,
    "Softmax": _softmax,
    "Sort": lambda node: Call(partial(mx.sort, axis=node.arg[0])),
    "Split": Call(mx.split, lambda arg: ([*arg[0]], arg[1])),
    "Sqrt": lambda node: Call(mx.rsqrt if node.arg[0] else mx.sqrt),
    "Squeeze": Call(mx.squeeze, _in_one),
    "Transpose": Call(mx.transpose, _in_one),
    "Unflatten": Call(mx.unflatten, _as_they_are),
    "View": Call(mx.view, _as_they_are),
}


def call_of(node: Node) -> Call:
    """The call of a primitive.

    Raises:
        KeyError: there is none for such a node.
    """
    entry = CALLS[node.op]
    return entry if isinstance(entry, Call) else entry(node)
