"""A step of decoding, with its rotary embedding and its cache, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import unwrap
from typing import Any, cast

import mlx.core as mx

from ...metal.attention import step as metal
from ...metal.attention.decode import _combine
from ...metal.attention.step import Rotation, Step
from ...reference import attention_step as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Problem
from ..lookup import rounded
from ..moves import Axis, Group, GroupTop, Unroll
from .packed import Path

# Numbers in `places` at least.
_PLACES = 8


class AttentionStep(Family[Step]):
    """One token of each sequence, which attends to a buffer that is full but for its own row.

    Its shape is (B, H, Hkv, S, D, Dv), of which results for S hold up to its power of two.
    """

    name = "attention_step"
    configs = (Step,)
    kernels = (metal._kernel(False, False), _combine(False))
    axes = (
        Axis(Group, "simds", (2, 4, 8, 16, 32)),
        Axis(Unroll, "ahead", (1, 2, 4, 8)),
        Axis(GroupTop, "stretches", (1, 2, 4, 8, 16)),
    )

    def heuristic(self, problem: Problem, device: str) -> Step:
        return cast(Step, unwrap(metal.configure)(device, problem.dtype, *problem.shape))

    def why_not(self, config: Step, problem: Problem) -> str | None:
        *_, keys, width, v_width = problem.shape
        if config.simds * config.stretches * config.ahead > keys:
            return f"{config} for {keys} keys"
        memory = metal._memory(T=problem.dtype, D=width, Dv=v_width, simds=config.simds)
        return None if memory <= MAX_THREADGROUP_MEMORY else f"{memory} bytes of threadgroup memory"

    def inputs(self, problem: Problem) -> list[mx.array]:
        batch, heads, kv_heads, keys, width, v_width = problem.shape
        shapes: tuple[tuple[int, ...], ...] = (
            *(
                (batch, 1, heads * width),
                (batch, 1, kv_heads * width),
                (batch, 1, kv_heads * v_width),
            ),
            *((batch, kv_heads, keys, width), (batch, kv_heads, keys, v_width)),
        )
        arrays = [mx.random.normal(shape).astype(problem.dtype) for shape in shapes]
        return [*arrays, mx.full((max(_PLACES, 1 + batch),), keys - 1, mx.int32)]

    def run(self, inputs: list[mx.array], problem: Problem, config: Step) -> mx.array:
        *_, width, _ = problem.shape
        return metal.attention_step(
            *inputs,
            scale=width**-0.5,
            rotation=Rotation(width),
            freqs=None,
            mask=None,
            config=config,
        )[0]

    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        *arrays, places = inputs
        return self._composed([*(a.astype(mx.float32) for a in arrays), places], problem)

    def paths(self, problem: Problem) -> Mapping[str, Path]:
        return {"stock": lambda inputs: self._composed(inputs, problem)}

    def _composed(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        rotation = Rotation(problem.shape[4])
        options: dict[str, Any] = {"dims": rotation.dims, "traditional": rotation.traditional}
        options |= {"base": rotation.base, "rope_scale": rotation.scale, "freqs": None}
        scale = problem.shape[4] ** -0.5
        return reference.attention_step(*inputs, **options, scale=scale, mask=None)[0]

    def registers(self, config: Step, problem: Problem) -> int:
        return 48 + 4 * problem.dtype.size * config.ahead

    def part(self, problem: Problem) -> tuple[Problem, float]:
        batch, heads, kv_heads, *shape = problem.shape
        part = replace(problem, shape=(1, heads // kv_heads, 1, *shape))
        return part, float(batch * kv_heads)

    def asked(self, dtype: mx.Dtype, *shape: int) -> Problem:
        return Problem(shape, dtype, "")

    def bucket(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *leading, keys, width, v_width = shape
        return *leading, rounded(keys), width, v_width


ATTENTION_STEP = AttentionStep()
