"""Arrays of a graph that lie in a larger one. For NVIDIA GPUs alone, frozen.

For every array that a launch gives, MLX makes nodes, memory and a record of who uses it: that takes
about a microsecond, and most of the time of a launch that gives three or four. So in a graph that
is only evaluated a launch gives one array, and later ones take that and read their inputs in it.
Whoever else uses such an array gets it as a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate, compress, groupby
from math import prod
from typing import NamedTuple

import mlx.core as mx

from .backend import undone
from .generated_source import TYPES, shape_words
from .launch import Bound, Launch
from .program import Parameter, Program
from .spec import Spec

# Bytes to a multiple of which arrays begin: more than any load of a kernel takes at once.
_ALIGNMENT = 128


class View(NamedTuple):
    """An array ``y`` in a larger one, ``whole``, which has one axis, from byte ``start`` on."""

    y: mx.array
    whole: mx.array
    start: int


class Arena:
    """The views of a graph, by the identity of their arrays.

    Launches give arrays with the shapes and dtypes in ``apart`` as they are, since these leave the
    graph; the ``given`` arrays lie in others from the start.
    """

    def __init__(self, apart: Sequence[mx.array], given: Sequence[View]) -> None:
        self.apart = {Spec.of(each) for each in apart}
        self.found = {id(each.y): each for each in given}
        # Arrays of these leave the graph in pairs.
        self.pairs = set[Spec]()

    def keep(self, whole: mx.array, start: int, spec: Spec) -> mx.array:
        """The array that lies there in another one."""
        y = _part(whole, start, spec)
        self.found[id(y)] = View(y, whole, start)
        return y


class _Layout(NamedTuple):
    """Where arrays of a launch lie in larger ones, ``wholes`` of inputs and ``made`` of outputs."""

    # The number of the larger array, the byte, and the shape if the kernel asks for it; None for an
    # array of its own.
    inputs: tuple[tuple[int, int, tuple[int, ...]] | None, ...]
    wholes: tuple[Spec, ...]
    # The number of the output, that of the larger array, the byte.
    outputs: tuple[tuple[int, int, int], ...]
    made: tuple[Spec, ...]


# That of the graph which is being made, if launches may share arrays in it.
current: ContextVar[Arena | None] = ContextVar("arena", default=None)


@contextmanager
def arena(apart: Sequence[mx.array], given: Sequence[View] = ()) -> Iterator[None]:
    """Let each launch of a ``with`` block give one array, if the backend can: see Arena."""
    before = current.get()
    with undone(lambda: current.set(before)):
        current.set(Arena(apart, given))
        yield


def are_alike(x: mx.array, y: mx.array) -> bool:
    """Whether two arrays can be halves of one."""
    return Spec.of(x) == Spec.of(y) and x.nbytes % _ALIGNMENT == 0


def halves(whole: mx.array) -> tuple[mx.array, mx.array]:
    """The halves of an array, as arrays in it; two like them leave the graph in one, too."""
    spec = Spec((len(whole) // 2, *whole.shape[1:]), whole.dtype)
    if (those := current.get()) is None:
        return whole[: len(whole) // 2], whole[len(whole) // 2 :]
    those.pairs.add(spec)
    return those.keep(whole, 0, spec), those.keep(whole, whole.nbytes // 2, spec)


def joined(x: mx.array, y: mx.array) -> mx.array:
    """An array of which two are the halves: that in which they lie, if they do."""
    those = current.get()
    found = [those.found.get(id(each)) for each in (x, y)] if those else []
    if found and found[0] and found[1] and found[0].whole is found[1].whole:
        whole = found[0].whole
        if (found[0].start, found[1].start) == (0, x.nbytes) and whole.nbytes == 2 * x.nbytes:
            return whole
    return mx.concatenate([x, y])


def places(arrays: Sequence[mx.array | None]) -> tuple[tuple[int, int] | None, ...]:
    """Where arrays lie in larger ones, by the numbers of these and their first bytes."""
    those, numbers = current.get(), dict[int, int]()
    found = [those.found.get(id(x)) if those else None for x in arrays]
    return tuple(
        each and (numbers.setdefault(id(each.whole), len(numbers)), each.start) for each in found
    )


def side_by_side(arrays: Sequence[mx.array]) -> list[View]:
    """Copy arrays into one array, in which they lie from then on; they stay the same objects."""
    specs, parts = [*map(Spec.of, arrays)], []
    for x, spec in zip(arrays, specs, strict=True):
        parts.append(x.flatten().view(mx.uint8))
        parts.append(mx.zeros((_bytes(spec) - x.nbytes,), mx.uint8))
    # As few elements as can be: by their number MLX begins another command buffer.
    whole = mx.concatenate([each for each in parts if each.size]).view(mx.uint64)
    views = beside(arrays, whole)
    parts = [_part(whole, each.start, spec) for each, spec in zip(views, specs, strict=True)]
    mx.eval(whole, parts)
    for x, part in zip(arrays, parts, strict=True):
        x[:] = part
    return views


def beside(arrays: Sequence[mx.array], whole: mx.array) -> list[View]:
    """Where arrays lie that are side by side in another one."""
    starts = accumulate((_bytes(Spec.of(x)) for x in arrays), initial=0)
    return [View(x, whole, start) for x, start in zip(arrays, starts, strict=False)]


def still_there(views: Sequence[View]) -> list[View]:
    """Those whose arrays hold what lies there: who writes into an array makes it one by itself."""
    kept = list[View]()
    for _, group in groupby(views, lambda each: id(each.whole)):
        some = [*group]
        parts = (_part(each.whole, each.start, Spec.of(each.y)) for each in some)
        pairs = zip(parts, some, strict=True)
        same = [mx.array_equal(part, each.y, equal_nan=True) for part, each in pairs]
        mx.eval(same)
        kept += compress(some, map(mx.array.item, same))
    return kept


def _part(whole: mx.array, start: int, spec: Spec) -> mx.array:
    flat = whole if whole.dtype == spec.dtype else whole.view(spec.dtype)
    return mx.as_strided(flat, spec.shape, _strides(spec.shape), start // spec.dtype.size)


def sharing(launch: Launch, bind: Callable[[Launch], Bound]) -> Bound:
    """A launch whose inputs and outputs may lie in larger arrays, inside :func:`arena`."""
    program, specs = launch.program, [*map(Spec, launch.output_shapes, launch.output_dtypes)]
    words = [shape_words(program.source, p.name) for p in program.inputs]
    # Where launches share arrays, `constant` is no other memory.
    takes = [not p.reference for p in program.inputs]
    gives = launch.init_value is None and not program.atomic_outputs

    @cache
    def bound(layout: _Layout | None) -> Bound:
        return bind(launch if layout is None else _within(launch, layout))

    def run(arrays: list[mx.array]) -> list[mx.array]:
        if (those := current.get()) is None:
            return bound(None)(arrays)
        pairs = zip(arrays, takes, strict=True)
        found = [those.found.get(id(x)) if able else None for x, able in pairs]
        wholes = {id(each.whole): each.whole for each in found if each}
        outputs, made = _laid(specs, those) if gives else ((), ())
        if not wholes and not outputs:
            return bound(None)(arrays)
        numbers = {key: number for number, key in enumerate(wholes)}
        layout = _Layout(
            tuple(
                each and (numbers[id(each.whole)], each.start, each.y.shape * bool(w))
                for each, w in zip(found, words, strict=True)
            ),
            tuple(
                Spec.of(each) if each.ndim > 1 else Spec((_ALIGNMENT,), each.dtype)
                for each in wholes.values()
            ),
            outputs,
            made,
        )
        alone = [x for x, each in zip(arrays, found, strict=True) if each is None]
        ys = bound(layout)([*alone, *wholes.values()])
        ys, larger = ys[: len(ys) - len(made)], ys[len(ys) - len(made) :]
        for i, number, start in outputs:  # in turn, so that each is put where it belongs
            ys.insert(i, those.keep(larger[number], start, specs[i]))
        return ys

    return run


def _laid(
    specs: Sequence[Spec], those: Arena
) -> tuple[tuple[tuple[int, int, int], ...], tuple[Spec, ...]]:
    """How outputs lie in larger arrays, of which one has what stays and one a pair that leaves."""
    pair = [i for i, each in enumerate(specs) if each in those.pairs]
    pair = pair if len(pair) == 2 else []
    stays = [i for i, each in enumerate(specs) if each not in those.apart | those.pairs]
    found, made = list[tuple[int, int, int]](), list[Spec]()
    for inside in (stays, pair):
        if len(inside) < 2:
            continue
        # The first one is what others than kernels take, by one node less then.
        dtype, (first, *rest) = specs[inside[0]].dtype, specs[inside[0]].shape
        # All begin at multiples of their rows, where only the last one has rows of other sizes.
        rows = {i: specs[i].size * specs[i].dtype.size // (first or 1) for i in inside}
        order = sorted(inside, key=lambda i: rows[i] % _ALIGNMENT != 0)
        *starts, size = accumulate((_bytes(specs[i]) for i in order), initial=0)
        found += [(i, len(made), start) for i, start in zip(order, starts, strict=True)]
        row = -(-size // (first or 1) // _ALIGNMENT) * _ALIGNMENT // dtype.size
        made.append(Spec((2 * first, *rest) if inside is pair else (first, row), dtype))
    return tuple(sorted(found)), tuple(made)


def _bytes(spec: Spec) -> int:
    return -(-spec.size * spec.dtype.size // _ALIGNMENT) * _ALIGNMENT


def _within(launch: Launch, layout: _Layout) -> Launch:
    """A launch of which some arrays lie in larger ones."""
    inside = {i for i, *_ in layout.outputs}
    inputs = [x for x, at in zip(launch.inputs, layout.inputs, strict=True) if at is None]
    made = [*map(Spec, launch.output_shapes, launch.output_dtypes)]
    outputs = [each for i, each in enumerate(made) if i not in inside] + [*layout.made]
    return replace(
        launch,
        program=_program(launch.program, layout, [x.shape for x in inputs]),
        inputs=[*inputs, *layout.wholes],
        output_shapes=[each.shape for each in outputs],
        output_dtypes=[each.dtype for each in outputs],
    )


def _program(program: Program, layout: _Layout, shapes: Sequence[tuple[int, ...]]) -> Program:
    """A kernel that finds some of its arrays in larger ones; ``shapes`` are those of the others."""
    inside, lines = {i for i, *_ in layout.outputs}, list[str]()
    inputs = [p for p, at in zip(program.inputs, layout.inputs, strict=True) if at is None]
    own = zip(inputs, shapes, strict=True)
    names = [f"within_{number}" for number in range(len(layout.wholes))]
    wholes = [(name, each.shape) for name, each in zip(names, layout.wholes, strict=True)]
    for parameter, at in zip(program.inputs, layout.inputs, strict=True):
        if at is not None:
            number, start, shape = at
            name, axes = names[number], wholes[number][1][:-1]
            lines.append(_pointer(parameter, "const device", name, _counted(start, name, axes)))
            first = [f"{name}_shape[0]" for n in shape[:1] if axes == (n,)]
            lines += _words(program, parameter.name, shape, *first)
    sized = wholes + [(p.name, shape) for p, shape in own if not p.reference]
    for i, number, start in layout.outputs:
        axes = layout.made[number].shape[:-1]
        alike = (name for name, shape in sized if shape[: len(axes)] == axes)
        address = _counted(start, next(alike, ""), axes)
        lines.append(_pointer(program.outputs[i], "device", f"made_{number}", address))
    inputs += [
        Parameter(name, TYPES[spec.dtype], "device")
        for name, spec in zip(names, layout.wholes, strict=True)
    ]
    outputs = [p for i, p in enumerate(program.outputs) if i not in inside]
    outputs += [
        Parameter(f"made_{number}", TYPES[each.dtype], "device", writable=True)
        for number, each in enumerate(layout.made)
    ]
    return _replaced(program, "".join(lines), tuple(inputs), tuple(outputs))


@lru_cache(maxsize=512)
def _replaced(
    program: Program, lines: str, inputs: tuple[Parameter, ...], outputs: tuple[Parameter, ...]
) -> Program:
    """A kernel with lines ahead and other parameters: the same object for the same ones."""
    return replace(
        program,
        source=lines + program.source,
        inputs=inputs,
        outputs=outputs,
        input_names=tuple(p.name for p in inputs),
        output_names=tuple(p.name for p in outputs),
    )


def _counted(value: int, name: str, axes: tuple[int, ...]) -> str:
    """A number as a multiple of an input's leading axes: one text serves any batch size."""
    rows = prod(axes)
    if not (name and axes and rows and value) or value % rows:
        return str(value)
    sizes = "".join(f"size_t({name}_shape[{i}])*" for i in range(len(axes)))
    return f"{sizes}{value // rows}"


def _words(program: Program, name: str, shape: tuple[int, ...], *first: str) -> Iterator[str]:
    """The shape words that MLX would pass for an input; ``first`` is its first axis."""
    sizes = *first, *shape[len(first) :]
    values: dict[str, Sequence[object]] = {"_shape": sizes, "_strides": _strides(shape)}
    for word in shape_words(program.source, name):
        kind, declared = word.split()
        if declared == f"{name}_ndim":
            yield f"constexpr int {declared}={len(shape)};"
        else:
            numbers = ",".join(map(str, values[declared.removeprefix(name)]))
            yield f"const {kind.rstrip('*')} {declared}[]={{{numbers}}};"


def _strides(shape: Sequence[int]) -> list[int]:
    steps = [*accumulate(reversed(shape), int.__mul__, initial=1)]
    return steps[-2::-1]


def _pointer(parameter: Parameter, space: str, whole: str, start: str) -> str:
    kind, byte = f"{space} {parameter.type}*", f"{space} uint8_t*"
    address = f"reinterpret_cast<{byte}>({whole})+{start}"
    return f"{kind} {parameter.name}=reinterpret_cast<{kind}>({address});"
