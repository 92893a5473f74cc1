"""Attention of few queries over a long cache, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ...dispatch.tunable import AttentionDecodeProblem as Problem
from ...metal.attention import decode as metal
from ...metal.attention.decode import Decode
from ...options import AttentionCall, Scores
from ...reference import attention as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal
from ..moves import Axis, Group, GroupTop, Local, Unroll, Upcast

# Elements of a group of packed keys and values.
_GROUP = 64


class AttentionDecodeFamily(Family[Problem, Decode]):
    """One query for each of so many rows over the keys of so many caches."""

    problem = Problem
    axes = (
        Axis(GroupTop, "min_keys", (16, 32, 64, 128, 256, 512)),
        Axis(GroupTop, "max_splits", (16, 32, 64, 128, 256)),
        Axis(Group, "slice", (16, 32, 64)),
        Axis(Unroll, "blocks", (1, 2, 4)),
        Axis(Upcast, "columns", (1, 2, 4, 8)),
        Axis(Local, "combine", (4, 8, 16)),
    )

    def completed(self, config: Decode, problem: Problem) -> Decode:
        return replace(config, simds=-(-problem.v_width // config.slice))

    def why_not(self, config: Decode, problem: Problem) -> str | None:
        if config.columns > max(1, -(-problem.rows // 8)):
            return f"{config.columns} columns of 8 rows for {problem.rows}"
        if config.columns * config.slice > 256:
            return f"{config.columns * config.slice} sums a lane"
        names = ("columns", "simds", "blocks", "run")
        sizes: dict[str, Any] = {name: getattr(config, name) for name in names}
        memory = metal._memory(T=problem.dtype, D=problem.width, **sizes)
        if memory > MAX_THREADGROUP_MEMORY:
            return f"{memory} bytes of threadgroup memory"
        if config.min_keys < config.tile and config.min_keys != 16:
            return f"splits of {config.min_keys} keys are those of {config.tile}"
        return None

    def inputs(self, problem: Problem) -> Inputs:
        heads, keys = (1, problem.caches * problem.rows, 1), (1, problem.caches, problem.keys)
        shapes = (*heads, problem.width), (*keys, problem.width), (*keys, problem.v_width)
        q, k, v = normal(problem.dtype, *shapes)
        if not problem.bits:
            return [q, k, v]
        return [q, *mx.quantize(k, _GROUP, problem.bits), *mx.quantize(v, _GROUP, problem.bits)]

    def bind(self, inputs: Inputs, problem: Problem, config: Decode) -> Path:
        launch = metal.attention_decode(_call(inputs, problem), config)
        return lambda inputs: launch(*inputs, None, None)[0]

    def paths(self, inputs: Inputs, problem: Problem) -> Mapping[str, Path]:
        stock = reference.attention(_call(inputs, problem))
        return {"stock": lambda inputs: stock(*inputs, None, None)[0]}


def _call(inputs: Inputs, problem: Problem) -> AttentionCall:
    """Queries, keys and values, the latter of one array or of three."""
    q, *caches = map(Spec.of, inputs)
    half, scores = len(caches) // 2, Scores(problem.width**-0.5)
    return AttentionCall(q, tuple(caches[:half]), tuple(caches[half:]), scores)
