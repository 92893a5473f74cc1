"""A step of decoding, with its rotary embedding and its cache, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ...dispatch.tunable import AttentionStepProblem as Problem
from ...metal.attention import step as metal
from ...metal.attention.step import Step
from ...options import Rotation
from ...reference import attention_step as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal
from ..moves import Axis, Group, GroupTop, Unroll

# Positions that the kernel takes at least.
_POSITIONS = 8


class AttentionStepFamily(Family[Problem, Step]):
    """One token of each sequence, which attends to a buffer that is full but for its own row."""

    problem = Problem
    axes = (
        Axis(Group, "simds", (2, 4, 8, 16, 32)),
        Axis(Unroll, "ahead", (1, 2, 4, 8)),
        Axis(GroupTop, "splits", (1, 2, 4, 8, 16)),
    )

    def why_not(self, config: Step, problem: Problem) -> str | None:
        if config.simds * config.splits * config.ahead > problem.size:
            return f"{config} for {problem.size} keys"
        widths = {"D": problem.width, "Dv": problem.v_width}
        memory = metal._memory(T=problem.dtype, simds=config.simds, **widths)
        return None if memory <= MAX_THREADGROUP_MEMORY else f"{memory} bytes of threadgroup memory"

    def inputs(self, problem: Problem) -> Inputs:
        batch, kv_heads, size = problem.batch, problem.kv_heads, problem.size
        width, v_width = problem.width, problem.v_width
        rows = problem.heads * width, kv_heads * width, kv_heads * v_width
        buffers = [(batch, kv_heads, size, n) for n in (width, v_width)]
        arrays = normal(problem.dtype, *((batch, 1, n) for n in rows), *buffers)
        return [*arrays, mx.full((max(_POSITIONS, 1 + batch),), size - 1, mx.int32)]

    def bind(self, inputs: Inputs, problem: Problem, config: Step) -> Path:
        launch = metal.attention_step(*_given(inputs, problem), config)
        return lambda inputs: launch(*inputs, None, None)[0]

    def paths(self, inputs: Inputs, problem: Problem) -> Mapping[str, Path]:
        stock = reference.attention_step(*_given(inputs, problem))
        return {"stock": lambda inputs: stock(*inputs, None, None)[0]}


def _given(inputs: Inputs, problem: Problem) -> tuple[tuple[Spec | None, ...], float, Rotation]:
    """The arrays' specs, the scale and the rotation."""
    width = problem.width
    return (*map(Spec.of, inputs), None, None), width**-0.5, Rotation(width)
