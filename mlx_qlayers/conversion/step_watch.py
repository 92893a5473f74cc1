"""What a graph of a step sees and changes of MLX's functions while a model's code runs for it.

Code computes positions from what a cache holds: ranges between two of them, the number of its keys.
In a graph positions are arrays, and keys have rows that do not count. So where a range or a rotary
embedding begins is learned from two steps with other caches: what changes as the rows of a cache do
is counted in them, what changes as its tokens do is a position.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..formats import Format
from ..layers.qlinear import QLinear
from ..ops.experts import experts_products, leaves_experts
from ..ops.quantized_route import in_one_launch, is_qmv
from ..options import PackedMatrix, Rotation
from ..runtime.backend import Mode, current, mode, undone
from .cache_slots import Slot
from .compiled_blocks import together
from .experts import RULES, chosen_at_once
from .operands import of_layers
from .recorder import Node, Recorder, recording
from .step_kinds import Unsupported
from .step_slots import Step, current_step


class Positions(Unsupported):
    """Positions that have to be learned first."""


class Begin(NamedTuple):
    """Where a range or a rotary embedding begins.

    Attributes:
        shift: what is added to the rows of a cache that count; None: it begins as it is called.
        length: of a range; None for one that is as long as the buffer of a cache.
        cache: which.
    """

    shift: int | None
    length: int | None
    cache: int = 0


# What becomes of each call in turn; None where it stays as it is.
Learned = Sequence[Begin | None]


class _Calls:
    """Ranges and rotary embeddings of a step in turn."""

    def __init__(self, step: Step, learned: Learned | None, seen: list[Any] | None) -> None:
        self.step, self.learned, self.seen = step, learned, seen
        self.count = 0

    def begin(self, start: Any, stop: Any) -> Begin | None:
        """What becomes of the next one."""
        if self.learned is None:
            raise Positions("a range between positions")
        self.count += 1
        begin = self.learned[self.count - 1] if self.count <= len(self.learned) else None
        if self.seen is None:
            return begin
        self.seen.append((start, stop))
        # Only these change a shape.
        return begin if begin is not None and begin.length is None else None

    def ranged(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of ``mx.arange`` or NumPy's."""

        def call(*args: Any, **options: Any) -> Any:
            if current_step.get() is not self.step or len(args) != 2:
                return plain(*args, **options)
            if (begin := self.begin(*args)) is None:
                in_arrays = self.seen is not None and any(isinstance(a, mx.array) for a in args)
                return plain(*map(int, args) if in_arrays else args, **options)
            start, length = args[0], begin.length
            if begin.shift is not None:
                start = self.step.counted() + begin.shift
            if length is None:
                length = self.step.slots[begin.cache].static.shapes[0][2]
            return start + mx.arange(length)

        return call

    def turning(self, plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """In the place of ``mx.fast.rope``, whose result may go into attention."""

        def call(x: mx.array, dims: int, *args: Any, **options: Any) -> mx.array:
            inside, offset = current_step.get() is self.step, options.get("offset")
            if inside and isinstance(offset, int):
                begin = self.begin(offset, offset)
                if begin is not None and begin.shift is not None:
                    options["offset"] = self.step.counted() + begin.shift
            y = plain(x, dims, *args, **options)
            if inside and not args and x.ndim == 4:
                how = {"scale": 1.0, "freqs": None, **options}
                offset, freqs = how.pop("offset", None), how.pop("freqs")
                self.step.turn(y, x, Rotation(dims, **how), freqs, offset)
            return y

        return call

    def norming(self, plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """In the place of norms: a weight made of parameters, such as 1 + w, is computed once."""

        def call(x: mx.array, weight: Any, *args: Any, **options: Any) -> mx.array:
            inside = current_step.get() is self.step
            if inside and isinstance(weight, mx.array):
                with suppress(ValueError):  # one that is made of an input of the graph
                    mx.async_eval(weight)
            if inside and len(args) == 1 and not options:  # an RMS norm, by its epsilon
                return self.step.products.normed(plain, x, weight, *args)
            return plain(x, weight, *args, **options)

        return call

    def multiplying(self, plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """In the place of quantized layers."""

        def call(layer: Any, x: mx.array) -> mx.array:
            inside = current_step.get() is self.step and type(layer) is QLinear
            alike = layer.mode != "affine" or layer["scales"].dtype == x.dtype
            packed = of_layers(layer) if inside and alike and in_one_launch(x) else None
            if packed is None:
                return plain(layer, x)
            y: mx.array = together(None, *packed.static)(x, *packed.arrays)[0]
            return y

        return call

    def splitting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of ``mx.split``."""

        def call(*args: Any, axis: int = 0, **options: Any) -> Any:
            parts = None
            if current_step.get() is self.step and len(args) in (2, 3) and not options:
                parts = self.step.products.splitted(*args[:2], *args[2:] or (axis,))
            if parts is None:
                parts = plain(*args, **({"axis": axis} if len(args) < 3 else {}), **options)
            return parts

        return call

    def convolving(self, plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """In the place of ``mx.conv1d``: a row of a depthwise one is a sum of as many products."""

        def call(x: mx.array, weight: mx.array, *args: Any, **options: Any) -> mx.array:
            names = "stride", "padding", "dilation", "groups"
            how = {"padding": 0, "dilation": 1, **dict(zip(names, args, strict=False)), **options}
            plainly = (how.pop("groups", 1), how["padding"], how["dilation"]) == (x.shape[2], 0, 1)
            one = plainly and weight.shape == (x.shape[2], x.shape[1], 1)
            if current_step.get() is not self.step or not one:
                return plain(x, weight, *args, **options)
            columns = [mx.contiguous(weight[:, i, 0]) for i in range(x.shape[1])]
            with suppress(ValueError):  # as of norms
                mx.async_eval(columns)
            rows = (x[:, i : i + 1].astype(mx.float32) for i in range(x.shape[1]))
            y = sum((a * b for a, b in zip(rows, columns, strict=True)), start=mx.array(0.0))
            return y.astype(x.dtype)

        return call

    def by_head(self, plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """In the place of layers with a matrix for each head: they are products with experts."""

        def call(layer: Any, x: mx.array, transpose: bool = True) -> mx.array:
            inside = current_step.get() is self.step and transpose and x.ndim == 4
            if not inside or x.shape[2] != 1 or not is_qmv(x[:, 0]):
                return plain(layer, x, transpose)
            batch, heads, _, width = x.shape
            # A constant of the graph.
            experts = mx.array([[*range(heads)]] * batch, mx.uint32)
            names = ("weight", "scales", "biases", "bias")
            matrix = PackedMatrix(*(layer.get(name) for name in names))
            fmt = Format(layer.group_size, layer.bits, layer.mode)
            rows = x.reshape(batch, heads, width)
            if leaves_experts(rows, experts, matrix, fmt):
                return plain(layer, x, transpose)
            (y,) = experts_products(rows, experts, [matrix], fmt)
            return self.step.keep_rows(mx.expand_dims(y, 2), y)

        return call


@contextmanager
def watched(
    step: Step, learned: Learned | None = None, seen: list[Any] | None = None
) -> Iterator[None]:
    """Run a model's code for a graph, in this thread.

    Args:
        step: the graph's.
        learned: by :func:`learn`.
        seen: gets where each range and rotary embedding begins and ends.
    """
    import numpy as np

    from ..layers.multi_linear import QMultiLinear

    calls = _Calls(step, learned, seen)
    replaced = [
        (mx.fast, "rope", calls.turning),
        (mx.fast, "rms_norm", calls.norming),
        (mx.fast, "layer_norm", calls.norming),
        (mx, "arange", calls.ranged),
        (mx, "split", calls.splitting),
        (mx, "conv1d", calls.convolving),
        (np, "arange", calls.ranged),
        (QLinear, "__call__", calls.multiplying),
        (QMultiLinear, "__call__", calls.by_head),
    ]
    views = dict.fromkeys(("reshape", "transpose", "swapaxes", "flatten"), step.viewed)
    views |= {"contiguous": step.viewed, "astype": partial(_cast, step)}
    rules = {**RULES, **views, "add": step.products.added, "mul": step.products.multiplied}
    recorder = Recorder(rules, latest=step.products.latest, on_pair=chosen_at_once)
    differentiated = current.get().mode is Mode.TRANSFORMED
    own_mode = mode(Mode.TRANSFORMED if differentiated else Mode.INFERENCE)
    with _replacing, recording(recorder), own_mode:
        own = [(module, name, getattr(module, name)) for module, name, _ in replaced]
        before = current_step.get()

        def put_back() -> None:
            current_step.set(before)
            for each in own:
                setattr(*each)

        with undone(put_back):
            current_step.set(step)
            for (module, name, made), (*_, plain) in zip(replaced, own, strict=True):
                setattr(module, name, made(plain))
            yield
    if seen is None and learned is not None and calls.count != len(learned):
        raise Positions("other ranges than with fewer rows")


def _cast(step: Step, recorder: Recorder, node: Node) -> mx.array | None:
    """For an array that is cast, maybe to the dtype that it has: what takes its place."""
    y = RULES["astype"](recorder, node)
    return step.viewed(recorder, node) if y is None else y


def learn(trial: Callable[..., Step], run: Callable[[Step], Any], more: int) -> Learned:
    """What becomes of each range and rotary embedding of a model's code.

    Args:
        trial: makes a step whose caches have so many more rows, and so many more tokens each.
        run: the model's code, of which nothing is computed but where those begin and end.
        more: rows of the second of two steps.

    Raises:
        Positions: with more rows the code takes another branch.
    """
    learned: Learned = []
    while True:
        one, two = (_seen(trial(*each), learned, run) for each in ((0,), (more, lambda i: 1 + i)))
        pairs, before = zip(one.ends, two.ends, strict=False), len(learned)
        learned = [_begin(*pair, one, two) for pair in pairs]
        error = one.error or two.error
        if error is None and len(one.ends) == len(two.ends):
            return learned
        if len(learned) == before:
            raise error or Positions("its code depends on how many rows a cache has")


class _Seen(NamedTuple):
    """What a step showed: where ranges begin and end, the rows of caches that count, all rows."""

    ends: list[Any]
    counted: dict[int, int]
    rows: int
    error: Exception | None


def _seen(step: Step, learned: Learned, run: Callable[[Step], Any]) -> _Seen:
    slots = {i: slot for i, slot in enumerate(step.slots) if isinstance(slot, Slot)}
    counted = {i: int(slot.rows()[1]) + 1 for i, slot in slots.items()}
    rows = max((slot.static.shapes[0][2] for slot in slots.values()), default=0)
    seen, error = list[Any](), None
    try:
        with watched(step, learned, seen):
            run(step)
    except Exception as problem:
        error = problem
    return _Seen(seen, counted, rows, error)


def _begin(ends: Any, others: Any, one: _Seen, two: _Seen) -> Begin | None:
    (start, stop), (start_2, stop_2) = ([int(end) for end in each] for each in (ends, others))
    length, longer = stop - start, (stop_2 - start_2) - (stop - start)
    if any(isinstance(end, mx.array) for end in ends):
        if not longer:
            return Begin(None, length)
        for cache, count in one.counted.items():
            if (length, longer) == (count, two.counted[cache] - count):
                return Begin(None, None, cache)
    elif start == start_2:
        return None  # if it changes, then as the buffers
    elif not longer and start_2 - start == two.rows - one.rows:
        return Begin(start - one.rows, length)
    raise Unsupported("a range that is neither of positions nor of rows")


# While a graph is made, these functions are not MLX's own.
_replacing = threading.RLock()
