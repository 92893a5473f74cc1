"""Attention, as the tuner sees it: forward, of few queries, and as a step of decoding."""

from __future__ import annotations

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
from ...options import AttentionCall, Rotation, Scores
from ...reference import attention as reference
from ...reference import attention_step as step_reference
from ...runtime import tensor_ops
from ...runtime.backend import backend
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal

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
        return lambda inputs: launch(*inputs, None, None)[0]

    def stock(self, inputs: Inputs, problem: AttentionForwardProblem) -> mx.array:
        q, *caches = inputs
        if problem.bits:  # no operator of MLX takes them without all scores in memory
            dequantize: Any = partial(mx.dequantize, group_size=_GROUP, bits=problem.bits)
            caches = [dequantize(*parts) for parts in (caches[:3], caches[3:])]
        return _stock([q, *caches], Scores(problem.shape[5] ** -0.5, problem.causal))

    def paths(self, inputs: Inputs, problem: AttentionForwardProblem) -> dict[str, Path]:
        found = super().paths(inputs, problem)
        if backend() == "metal" and tensor_ops.missing() is None and not problem.bits:
            at = Launcher(_call(inputs, Scores(problem.shape[5] ** -0.5, problem.causal)))
            if why_no_tensors(at) is None:
                launch = attention_tensor(at)
                found["tensor"] = lambda inputs: launch(*inputs, None, None)[0]
        return found


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
        return lambda inputs: launch(*inputs, None, None)[0]

    def stock(self, inputs: Inputs, problem: AttentionDecodeProblem) -> mx.array:
        return _stock(inputs, Scores(problem.width**-0.5))


class AttentionStepFamily(Family[AttentionStepProblem, Step]):
    """One token of each sequence, which attends to a full cache and half a tail."""

    problem = AttentionStepProblem

    def inputs(self, problem: AttentionStepProblem) -> Inputs:
        batch, kv_heads, size = problem.batch, problem.kv_heads, problem.size
        width, v_width = problem.width, problem.v_width
        rows = problem.heads * width, kv_heads * width, kv_heads * v_width
        buffers = [(batch, kv_heads, s, n) for s in (size, _TAIL) for n in (width, v_width)]
        arrays = normal(problem.dtype, *((batch, 1, n) for n in rows), *buffers)
        positions = [size, _TAIL // 2, *[size + _TAIL // 2] * max(_POSITIONS, batch)]
        return [*arrays, mx.array(positions, mx.int32)]

    def bind(self, inputs: Inputs, problem: AttentionStepProblem, config: Step) -> Path:
        optional: list[Any] = [None] * 5
        if backend() == "cuda":
            optional.append(mx.zeros(max(_POSITIONS, problem.batch * problem.heads), mx.int32))
        specs, scale, rotation = _step(inputs, problem)
        specs = (*specs, *map(Spec.of, optional[5:]))
        launch = step.attention_step(specs, scale, rotation, config)
        return lambda inputs: launch(*inputs, *optional)[0]

    def stock(self, inputs: Inputs, problem: AttentionStepProblem) -> mx.array:
        stock = step_reference.attention_step(*_step(inputs, problem))
        return stock(*inputs)[0]


def _packed(inputs: Inputs, bits: int) -> Inputs:
    """Queries, keys and values, the latter packed if there are bits."""
    q, *caches = inputs
    return [q, *(a for x in caches for a in (mx.quantize(x, _GROUP, bits) if bits else (x,)))]


def _call(inputs: Inputs, scores: Scores) -> AttentionCall:
    """Queries, keys and values, the latter of one array or of three."""
    q, *caches = map(Spec.of, inputs)
    half = len(caches) // 2
    return AttentionCall(q, tuple(caches[:half]), tuple(caches[half:]), scores)


def _stock(inputs: Inputs, scores: Scores) -> mx.array:
    """As ``auto`` computes attention without a kernel."""
    call = _call(inputs, scores)
    return (reference.stock(call) or reference.attention(call))(*inputs, None, None)[0]


def _step(
    inputs: Inputs, problem: AttentionStepProblem
) -> tuple[tuple[Spec | None, ...], float, Rotation]:
    """The arrays' specs, the scale and the rotation."""
    specs = (*map(Spec.of, inputs), *[None] * 5)
    return specs, problem.width**-0.5, Rotation(problem.width)
