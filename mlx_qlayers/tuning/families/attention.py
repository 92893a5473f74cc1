"""Attention, as the tuner sees it: forward, of few queries, and as a step of decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ...dispatch.tunable import (
    AttentionDecodeProblem,
    AttentionForwardProblem,
    AttentionStepProblem,
)
from ...metal.attention import decode, forward, step
from ...metal.attention.decode import Decode, Serial
from ...metal.attention.forward import Launcher
from ...metal.attention.layout import Layout
from ...metal.attention.step import Step
from ...metal.attention.tensor import attention_tensor, why_no_tensors
from ...options import AttentionCall, Rotation, Scores, StepCall
from ...reference import attention as reference
from ...reference.attention_step import packed_rows, parts_of_rows
from ...runtime import tensor_ops
from ...runtime.backend import backend
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, exactly, in_float32, in_parts, normal

# Elements of a group of packed keys and values.
_GROUP = 64
# Positions that a step takes at least, and rows of its tail.
_POSITIONS, _TAIL = 8, 256


class AttentionForwardFamily(Family[AttentionForwardProblem, Layout]):
    """Attention of many queries without a mask but the causal one."""

    problem = AttentionForwardProblem

    def inputs(self, problem: AttentionForwardProblem) -> Inputs:
        batch, heads, kv_heads, queries, keys, width, v_width = problem.shape
        shapes = (heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, v_width)
        return _packed(normal(problem.dtype, *((batch, *shape) for shape in shapes)), problem.bits)

    def bind(self, inputs: Inputs, problem: AttentionForwardProblem, config: Layout) -> Path:
        call = _call(inputs, Scores(problem.shape[5] ** -0.5, problem.causal))
        launch = forward.attention_forward(Launcher(call), config)
        return lambda inputs: launch(*inputs, None, None)[:1]

    def stock(self, inputs: Inputs, problem: AttentionForwardProblem) -> Inputs:
        q, *caches = inputs
        if problem.bits:  # no operator of MLX takes them without all scores in memory
            dequantize: Any = partial(mx.dequantize, group_size=_GROUP, bits=problem.bits)
            caches = [dequantize(*parts) for parts in (caches[:3], caches[3:])]
        return _stock([q, *caches], Scores(problem.shape[5] ** -0.5, problem.causal))

    def paths(self, inputs: Inputs, problem: AttentionForwardProblem) -> dict[str, Path]:
        found = super().paths(inputs, problem)
        if backend() == "metal" and tensor_ops.missing() is None and not problem.bits:
            call = _call(inputs, Scores(problem.shape[5] ** -0.5, problem.causal))
            if why_no_tensors(Launcher(call)) is None:
                found["tensor"], found["tensor_memory"] = (
                    partial(_by_tensors, attention_tensor(Launcher(call, handed)))
                    for handed in (True, False)
                )
        return found


def _by_tensors(launch: Callable[..., Inputs], inputs: Inputs) -> Inputs:
    return launch(*inputs, None, None)[:1]


class AttentionDecodeFamily(Family[AttentionDecodeProblem, Any]):
    """One query for each of so many rows over the keys of so many caches."""

    problem = AttentionDecodeProblem

    def is_fixed(self, config: Any) -> bool:
        return isinstance(config, Serial)

    def inputs(self, problem: AttentionDecodeProblem) -> Inputs:
        heads, keys = (1, problem.caches * problem.rows, 1), (1, problem.caches, problem.keys)
        shapes = (*heads, problem.width), (*keys, problem.width), (*keys, problem.v_width)
        return _packed(normal(problem.dtype, *shapes), problem.bits)

    def bind(self, inputs: Inputs, problem: AttentionDecodeProblem, config: Decode) -> Path:
        launch = decode.attention_decode(_call(inputs, Scores(problem.width**-0.5)), config)
        return lambda inputs: launch(*inputs, None, None)

    def stock(self, inputs: Inputs, problem: AttentionDecodeProblem) -> Inputs:
        return _stock(inputs, Scores(problem.width**-0.5))


class AttentionStepFamily(Family[AttentionStepProblem, Step]):
    """One token of each sequence, which attends to a cache, and to half a tail.

    The cache has room for the rows of the tail and holds them: MLX, which has no tail, writes the
    token behind them and attends to the cache.
    """

    problem = AttentionStepProblem

    def inputs(self, problem: AttentionStepProblem) -> Inputs:
        batch, kv_heads, (first, held) = problem.batch, problem.kv_heads, _ranges(problem)
        widths = problem.width, problem.v_width
        rows = problem.heads * problem.width, *(kv_heads * n for n in widths)
        token = normal(problem.dtype, *((batch, 1, n) for n in rows))
        caches, tails = list[mx.array](), list[mx.array]()
        for n in widths:
            shapes = [(batch, kv_heads, rows, n) for rows in (problem.keys, _TAIL - held)]
            cache, more = (_parts(a, problem) for a in normal(problem.dtype, *shapes))
            pairs = zip((a[:, :, first : first + held] for a in cache), more, strict=True)
            tail = [mx.concatenate([*pair], axis=2) for pair in pairs]
            caches += cache
            tails += [packed_rows(tail)] if problem.bits else tail
        positions = [first, held, *[first + held] * max(_POSITIONS, batch)]
        return [*token, *caches, *tails, mx.array(positions, mx.int32)]

    def bind(self, inputs: Inputs, problem: AttentionStepProblem, config: Step) -> Path:
        optional: list[Any] = [None] * 5
        if backend() == "cuda":
            optional.append(mx.zeros(max(_POSITIONS, problem.batch * problem.heads), mx.int32))
        specs = (*map(Spec.of, inputs), *[None] * 5, *map(Spec.of, optional[5:]))
        launch = step.attention_step(specs, problem.width**-0.5, Rotation(problem.width), config)
        return lambda inputs: launch(*inputs, *optional)

    def stock(self, inputs: Inputs, problem: AttentionStepProblem) -> Inputs:
        """Attention, and the caches with the token's rows."""
        call, (first, held) = StepCall.of(inputs), _ranges(problem)
        q, k = (a.reshape(len(a), -1, 1, problem.width) for a in inputs[:2])
        at, v = first + held, call.v.reshape(len(q), -1, 1, problem.v_width)
        q, k, start = _turned(q, at), _turned(k, at), mx.array([at])
        new = [*_parts(k, problem), *_parts(v, problem)]
        pairs = zip((*call.k_cache, *call.v_cache), new, strict=True)
        written = [mx.slice_update(a, row.astype(a.dtype), start, (2,)) for a, row in pairs]
        seen = [a[:, :, : at + 1] for a in written]
        out = _stock([q, *seen], Scores(problem.width**-0.5))[0]
        return [out.reshape(len(out), 1, -1), *written]

    def replaced(self, path: str, problem: AttentionStepProblem) -> range:
        caches = 6 if problem.bits else 2
        return range(3, 3 + caches) if path == "stock" else range(3 + caches, 5 + caches)

    def reference(self, inputs: Inputs, problem: AttentionStepProblem) -> Inputs:
        out, *caches = super().reference(inputs, problem)
        first, held = _ranges(problem)
        half = len(caches) // 2
        tails = (_numbers(parts, problem) for parts in (caches[:half], caches[half:]))
        behind = [(0, 0), (0, 0), (0, _TAIL - held - 1), (0, 0)]
        return [out, *(mx.pad(a[:, :, first : first + held + 1], behind) for a in tails)]

    def numbers(self, outputs: Inputs, problem: AttentionStepProblem) -> Inputs:
        out, *tails = outputs
        if problem.bits:
            for i, n in enumerate((problem.width, problem.v_width)):
                sizes = n * problem.bits // 32, n // problem.group_size
                like = [Spec((size,), problem.dtype) for size in (*sizes, sizes[1])]
                tails[i] = _numbers(parts_of_rows(tails[i], like), problem)
        return [out, *tails]

    def tolerances(self, problem: AttentionStepProblem, outputs: int) -> list[float]:
        first, *others = super().tolerances(problem, outputs)
        # A row that was rounded before it was packed may have another code.
        return [first, *([2 / (2**problem.bits - 1)] * len(others) if problem.bits else others)]


def _turned(x: mx.array, at: int) -> mx.array:
    """Heads at a position; exactly by exact angles: MLX's are products in float32."""
    half, base = x.shape[-1] // 2, 10000.0
    if not exactly.get():
        return mx.fast.rope(x, 2 * half, traditional=False, base=base, scale=1.0, offset=at)
    angles = [at * base ** (-i / half) for i in range(half)]
    cos, sin = (mx.array(list(map(f, angles)), x.dtype) for f in (math.cos, math.sin))
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _ranges(problem: AttentionStepProblem) -> tuple[int, int]:
    """The keys of the cache that count, and those of the tail."""
    held = min(_TAIL, problem.keys) // 2
    return problem.keys - held - 1, held


def _parts(x: mx.array, problem: AttentionStepProblem) -> Inputs:
    """Keys or values, packed if there are bits."""
    return list(mx.quantize(x, problem.group_size, problem.bits)) if problem.bits else [x]


def _numbers(parts: Sequence[mx.array], problem: AttentionStepProblem) -> mx.array:
    """Keys or values in float32."""
    first, *groups = map(in_float32, parts)
    dequantize: Any = partial(mx.dequantize, group_size=problem.group_size, bits=problem.bits)
    return dequantize(first, *groups) if groups else first


def _packed(inputs: Inputs, bits: int) -> Inputs:
    """Queries, keys and values, the latter packed if there are bits."""
    q, *caches = inputs
    return [q, *(a for x in caches for a in (mx.quantize(x, _GROUP, bits) if bits else (x,)))]


def _call(inputs: Inputs, scores: Scores) -> AttentionCall:
    """Queries, keys and values, the latter of one array or of three."""
    q, *caches = map(Spec.of, inputs)
    half = len(caches) // 2
    return AttentionCall(q, tuple(caches[:half]), tuple(caches[half:]), scores)


def _stock(inputs: Inputs, scores: Scores) -> Inputs:
    """As ``auto`` computes attention without a kernel."""
    q, *caches = inputs
    queries, keys, found = q.shape[2], caches[0].shape[2], list[mx.array]()
    for at in in_parts(queries):
        # The last of fewer queries sees fewer keys.
        last = keys - max(queries - at.stop, 0) if scores.causal else keys
        given = [q[:, :, at], *(a[:, :, :last] for a in caches)]
        call = _call(given, scores)
        found += (reference.stock(call) or reference.attention(call))(*given, None, None)
    return [mx.concatenate(found, axis=2)]
