"""Models that were loaded lazily, of which a rank reads no more than its share.

The share of a rank is found by sharding a twin of the model whose parameters are the positions of
their own elements. Rows and columns of one axis are then read out of the safetensors file by
themselves. Parameters that mlx-lm computes from several tensors, or that no file has, are
read whole and split, one parameter after the other.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .checkpoint import read_header
from .plan import copied
from .report import runs_of
from .sharding import shard_model

PARALLEL = ("tensor", "pipeline", "experts")


class Tensor(NamedTuple):
    """Where a tensor lies: in which bytes of a file."""

    file: Path
    offset: int
    size: int
    shape: tuple[int, ...]


class Part(NamedTuple):
    """Rows, columns or experts of a tensor, by their indices, and how many of zeros follow."""

    axis: int
    runs: list[range]
    zeros: int


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint lies, by its name."""
    found = {}
    for file in sorted(path.glob("model*.safetensors")):
        with file.open("rb") as data:
            start = 8 + int.from_bytes(data.read(8), "little")
        for name, entry in read_header(file).items():
            begin, end = entry["data_offsets"]
            found[name] = Tensor(file, start + begin, end - begin, tuple(entry["shape"]))
    return found


def take_share(
    model: Any, group: mx.distributed.Group, parallel: str, sources: dict[str, Tensor]
) -> None:
    """Leave a rank its share of a model whose parameters were not read yet, and read that.

    ``parallel`` is ``"tensor"``: a part of each layer; ``"pipeline"``: some layers; ``"experts"``:
    a part of each layer, and some experts of the mixtures. ``sources`` locates parameters that are
    a tensor of a file. A ValueError says that the model or a layer cannot be split.
    """
    positions: dict[str, mx.array] = {}
    if parallel == "pipeline":
        if not hasattr(getattr(model, "model", None), "pipeline"):
            raise ValueError(f"mlx-lm has no pipeline for {type(model).__module__}")
        model.model.pipeline(group)
    else:
        positions = _positions(model, group, parallel == "experts", sources)
        shard_model(model, group, experts=parallel == "experts")
    parts: dict[Any, Part | None] = {}
    for path, array in _flat(model):
        if path in positions:
            source, key = sources[path], (re.sub(r"\d+", "#", path), sources[path].shape)
            if key not in parts:
                parts[key] = _part(positions[path], source.shape)
            del positions[path]
            part = parts[key]
            if part is not None and source.size == prod(source.shape) * array.dtype.size:
                array = _read(source, part, array.dtype)
                model.update(tree_unflatten([(path, array)]))
        mx.eval(array)  # one by one: nothing is held beside it
    mx.clear_cache()


def _positions(
    model: nn.Module, group: mx.distributed.Group, experts: bool, sources: dict[str, Tensor]
) -> dict[str, mx.array]:
    """By the paths of parameters that are split which elements of a file's tensor are left."""
    twin = copied(model)
    whole = {path: _numbered(array) for path, array in _flat(twin) if path in sources}
    twin.update(tree_unflatten(list(whole.items())))
    shard_model(twin, group, experts=experts)
    left = _flat(twin)
    return {path: array for path, array in left if path in whole and array is not whole[path]}


def _flat(model: nn.Module) -> list[tuple[str, mx.array]]:
    """The parameters with their paths."""
    parameters: Any = tree_flatten(model.parameters())
    return list(parameters)


def _numbered(array: mx.array) -> mx.array:
    """The positions of an array's elements, from 1 on: what is 0 afterwards has been added."""
    dtype = mx.int32 if array.size < 2**31 - 1 else mx.int64
    return mx.arange(1, array.size + 1, dtype=dtype).reshape(array.shape)


def _part(positions: mx.array, whole: tuple[int, ...]) -> Part | None:
    """Which part of an array has been left of its positions, if it is one of a single axis."""
    if positions.dtype not in (mx.int32, mx.int64) or positions.ndim != len(whole):
        return None
    changed = [i for i, (a, b) in enumerate(zip(positions.shape, whole, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    axis = changed[0]
    first = mx.moveaxis(positions, axis, 0).reshape(positions.shape[axis], -1)[:, 0]
    real = first[: int((first > 0).sum())]  # zeros come behind
    indices = (real - 1) // prod(whole[axis + 1 :]) % whole[axis]
    expected = mx.take(_numbered(mx.broadcast_to(mx.array(0), whole)), indices, axis)
    zeros = len(first) - len(real)
    expected = mx.pad(expected, [(0, zeros if i == axis else 0) for i in range(len(whole))])
    if not mx.array_equal(expected, positions).item():
        return None
    wanted: Any = indices.tolist()
    return Part(axis, runs_of(wanted), zeros)


def _read(source: Tensor, part: Part, dtype: mx.Dtype) -> mx.array:
    """A part of a tensor; of the file no more is looked at than the pages that hold it."""
    import numpy as np

    kind = np.dtype(f"u{dtype.size}")
    whole = np.memmap(source.file, kind, "r", source.offset, source.shape)
    before = (slice(None),) * part.axis
    pieces = [mx.array(whole[(*before, slice(run.start, run.stop))]) for run in part.runs]
    if part.zeros:
        shape = [*source.shape]
        shape[part.axis] = part.zeros
        pieces.append(mx.zeros(shape, mx.array(np.empty(0, kind)).dtype))
    return mx.concatenate(pieces, part.axis).view(dtype)
