"""How each primitive of MLX is called: one table.

An entry has a function of arrays and further arguments, and what makes those of a node's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import mlx.core as mx

from .. import formats
from ..dispatch import Operation
from ..runtime.devices import device_of
from .graph import Node

MODES = tuple(formats.MODES)


class Call(NamedTuple):
    """A call of a primitive."""

    function: Callable[..., Any]  # of its arrays and what `more` gives
    # Further arguments, made of those of the node once they are numbers.
    more: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda arg: ()
    shaped: bool = False  # whether `more` takes the shape of the node instead


class Dispatched(NamedTuple):
    """An operation of this package, of the arrays of a node in turn."""

    operation: Operation  # what is dispatched
    static: tuple[Any, ...]  # its other arguments


# A call, or a function that makes one of a node.
Entry = Call | Callable[[Node], Call]


def _whole(arg: tuple[Any, ...]) -> tuple[Any, ...]:
    return (arg,)


# The first of a node's arguments; ``tuple`` gives all of them.
_ONE = itemgetter(slice(0, 1))


def slices(arg: tuple[Any, ...]) -> tuple[Any, ...]:
    """Starts, stops and steps as an index."""
    return (tuple(map(slice, *arg)),)


def _format(arg: tuple[Any, ...]) -> dict[str, Any]:
    """The options of what packs a matrix or takes a packed one."""
    return {"group_size": arg[0], "bits": arg[1], "mode": MODES[arg[2]]}


def _slice_update(node: Node) -> Call:
    kind, *_, strides = node.arg
    if kind != 4 or {*strides} != {1}:
        raise KeyError("SliceUpdate")
    axes = tuple(range(len(strides)))
    return Call(partial(_at, axes), lambda arg: (mx.array(arg[1], mx.int32),))


def _at(axes: tuple[int, ...], x: mx.array, update: mx.array, start: mx.array) -> mx.array:
    """An array with another at a place, in the same buffer where nobody else holds it."""
    if len(axes) > 1 or not device_of().gpu:
        return mx.slice_update(x, update, start, axes)
    # One launch, where MLX makes an offset first: 8 bytes, which it keeps in memory of the host.
    (axis,) = axes
    rows = start if update.shape[axis] == 1 else start + mx.arange(update.shape[axis])
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    index = mx.broadcast_to(rows.reshape(shape), update.shape)
    return mx.put_along_axis(x, index, update, axis)


def _positions(node: Node) -> Call:
    """Numbers that depend on positions, of the array that has all of those."""
    places = [each for _, each in node.arg]

    def moved(positions: mx.array, const: Any, terms: tuple[tuple[int, int], ...]) -> mx.array:
        total = None if isinstance(const, int) and not const else mx.array(const, node.dtype)
        for index, count in terms:
            one = positions[index : index + 1].reshape(()).astype(node.dtype)  # a view
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
    shape = node.src[0].shape
    whole = all(n == (1 if i in axes else shape[i]) for i, n in enumerate(sizes))
    if axes != tuple(range(len(axes))) or not whole:
        raise KeyError("Gather")
    return Call(_rows, _whole, shaped=True)


def _rows(x: mx.array, *rest: Any) -> mx.array:
    *indices, shape = rest
    y = mx.take(x, indices[0], axis=0) if len(indices) == 1 else x[tuple(indices)]
    return y.reshape(shape)


def _convolution(node: Node) -> Call:
    *lists, groups, flip = node.arg
    stride, low, high, kernel, inputs = ([*each] for each in lists)
    more: dict[str, Any] = {"kernel_dilation": kernel, "input_dilation": inputs}
    more |= {"stride": stride, "padding": (low, high), "groups": groups, "flip": flip}
    return Call(partial(mx.conv_general, **more))


def _gathered(node: Node) -> Call:
    transpose, *is_sorted = node.arg[3:]
    more = _format(node.arg) | {"transpose": transpose, "sorted_indices": any(is_sorted)}

    def call(x: mx.array, w: mx.array, scales: mx.array, *rest: Any) -> mx.array:
        biases, lhs, rhs = rest if len(rest) == 3 else (None, *rest)
        return mx.gather_qmm(x, w, scales, biases, lhs, rhs, **more)

    return Call(call)


def _rope(node: Node) -> Call:
    dims, traditional, base, scale = node.arg

    def call(x: mx.array, offset: mx.array, freqs: mx.array | None) -> mx.array:
        return mx.fast.rope(
            x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs
        )

    return Call(call)


def _pad(node: Node) -> Call:
    count = len(node.shape)

    def widths(arg: tuple[Any, ...]) -> tuple[Any, ...]:
        found = [(0, 0)] * count
        for axis, before, behind in zip(*arg, strict=True):
            found[axis] = before, behind
        return (found,)

    return Call(lambda x, value, found: mx.pad(x, found, constant_values=value), widths)


def _along(function: Callable[..., Any]) -> Callable[[Node], Call]:
    """Along an axis, which is its argument."""
    return lambda node: Call(partial(function, axis=node.arg[0]))


def _one_of(*functions: Callable[..., Any], **more: Any) -> Callable[[Node], Call]:
    """The first argument says which function it is, the second its axis."""

    def entry(node: Node) -> Call:
        axis = {"axis": node.arg[1]} if len(node.arg) > 1 else {}
        return Call(partial(functions[node.arg[0]], **axis, **more))

    return entry


def _scan(node: Node) -> Call:
    kind, axis, reverse, inclusive = node.arg
    function = (mx.cummax, mx.cummin, mx.cumsum, mx.cumprod, mx.logcumsumexp)[kind]
    return Call(partial(function, axis=axis, reverse=reverse, inclusive=inclusive))


def _scatter_axis(node: Node) -> Call:
    kind, axis = node.arg
    if kind != 1:
        raise KeyError("ScatterAxis")
    return Call(partial(mx.put_along_axis, axis=axis))


def _first(x: mx.array, *rest: mx.array) -> mx.array:
    return x


# Primitives that are functions of their arrays alone.
_PLAIN = (
    *("abs", "add", "ceil", "cos", "divide", "equal", "erf", "exp", "expm1", "floor"),
    *("floor_divide", "greater", "greater_equal", "less", "less_equal", "log1p", "logical_and"),
    *("logical_not", "logical_or", "matmul", "maximum", "minimum", "multiply", "negative"),
    *("not_equal", "power", "remainder", "round", "sigmoid", "sign", "sin", "square"),
    *("stop_gradient", "subtract", "tanh"),
)
_BITS = mx.bitwise_and, mx.bitwise_or, mx.bitwise_xor, mx.left_shift, mx.right_shift

CALLS: dict[str, Entry] = {
    **{"".join(map(str.capitalize, n.split("_"))): Call(getattr(mx, n)) for n in _PLAIN},
    "AddMM": lambda node: Call(lambda a, b, c: mx.addmm(c, a, b, *node.arg)),
    "AllSum": lambda node: Call(partial(mx.distributed.all_sum, group=node.arg[0])),
    "Arange": lambda node: Call(partial(mx.arange, dtype=node.dtype), tuple),
    "At": _positions,
    "ArgPartition": Call(mx.argpartition, tuple),
    "ArgReduce": _one_of(mx.argmin, mx.argmax, keepdims=True),
    "ArgSort": _along(mx.argsort),
    "AsType": Call(mx.array.astype, tuple),
    "BitwiseBinary": _one_of(*_BITS),
    "Broadcast": Call(mx.broadcast_to, _ONE),
    "Concatenate": lambda node: Call(lambda *some: mx.concatenate([*some], node.arg[0])),
    "Convolution": _convolution,
    "Copy": Call(_first),
    "Depends": Call(_first),
    "ExpandDims": Call(mx.expand_dims, _ONE),
    "Flatten": Call(mx.flatten, tuple),
    "Full": Call(mx.broadcast_to, _whole, shaped=True),
    "Gather": _gather,
    "GatherAxis": _along(mx.take_along_axis),
    "GatherMM": lambda node: Call(partial(mx.gather_mm, sorted_indices=any(node.arg))),
    "GatherQMM": _gathered,
    "Hadamard": Call(mx.hadamard_transform, tuple),
    "LayerNorm": lambda node: Call(mx.fast.layer_norm, tuple),
    "Log": _one_of(mx.log2, mx.log10, mx.log),
    "LogAddExp": Call(mx.logaddexp),
    "LogSumExp": Call(partial(mx.logsumexp, axis=-1, keepdims=True)),
    "Mask": Call(_first),
    "Numbers": lambda node: Call(
        lambda numbers: mx.array(numbers, node.dtype).reshape(node.shape), _whole
    ),
    "Pad": _pad,
    "Partition": Call(mx.partition, tuple),
    "Quantize": lambda node: Call(
        partial(mx.dequantize if node.arg[3] else mx.quantize, **_format(node.arg))
    ),
    "QuantizedMatmul": lambda node: Call(
        partial(mx.quantized_matmul, transpose=node.arg[3], **_format(node.arg))
    ),
    "RMSNorm": lambda node: Call(mx.fast.rms_norm, tuple),
    "Reduce": _one_of(mx.all, mx.any, mx.sum, mx.prod, mx.min, mx.max, keepdims=True),
    "Reshape": Call(mx.reshape, _ONE),
    "RoPE": _rope,
    "Scan": _scan,
    "ScatterAxis": _scatter_axis,
    "Select": Call(mx.where),
    "Slice": Call(operator.getitem, slices),
    "SliceAt": lambda node: Call(
        lambda x, start, sizes: mx.slice(x, start, node.arg[0], sizes), lambda arg: (arg[1],)
    ),
    "SliceUpdate": _slice_update,
    "SliceUpdateAt": lambda node: Call(partial(_at, node.arg)),
    "Softmax": lambda node: Call(partial(mx.softmax, axis=-1, precise=node.arg[0])),
    "Sort": _along(mx.sort),
    "Split": Call(mx.split, lambda arg: ([*arg[0]], arg[1])),
    "Sqrt": lambda node: Call(mx.rsqrt if node.arg[0] else mx.sqrt),
    "Squeeze": Call(mx.squeeze, _ONE),
    "Transpose": Call(mx.transpose, _ONE),
    "Unflatten": Call(mx.unflatten, tuple),
    "View": Call(mx.view, tuple),
}


def call_of(node: Node) -> Call:
    """The call of a primitive; a ``KeyError`` says that there is none for such a node."""
    entry = CALLS[node.op]
    return entry if isinstance(entry, Call) else entry(node)
