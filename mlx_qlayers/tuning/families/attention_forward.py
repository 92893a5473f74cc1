"""Attention of many queries, forward, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping

from ...dispatch.tunable import AttentionForwardProblem as Problem
from ...metal.attention.forward import Launcher, attention_forward
from ...metal.attention.layout import Layout, memory, registers
from ...options import AttentionCall, Scores
from ...reference import attention as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal
from ..moves import Axis, Buffer, Group, Local, Tile, Upcast

# Beyond these a thread's operands and sums leave no room for addresses.
_MOST_REGISTERS = 160


class AttentionForwardFamily(Family[Problem, Layout]):
    """Attention without a mask but the causal one."""

    problem = Problem
    axes = (
        Axis(Upcast, "blocks", (1, 2)),
        Axis(Local, "simds", (2, 4, 8)),
        Axis(Group, "slices", (1, 2, 4)),
        Axis(Tile, "tile", (16, 32, 64, 128)),
        Axis(Buffer, "alternate", (False, True)),
        Axis(Buffer, "ahead", (False, True)),
    )

    def why_not(self, config: Layout, problem: Problem) -> str | None:
        if config.threads > 1024:
            return f"{config.threads} threads"
        *_, width, v_width = problem.shape
        values = {"T": problem.dtype, "D": width, "DV": v_width, **config.template()}
        if (used := memory("forward", values)) > MAX_THREADGROUP_MEMORY:
            return f"{used} bytes of threadgroup memory"
        found = registers("forward", values)
        return f"{found} registers" if found > _MOST_REGISTERS else None

    def inputs(self, problem: Problem) -> Inputs:
        batch, heads, kv_heads, queries, keys, width, v_width = problem.shape
        q, kv = (batch, heads, queries, width), (batch, kv_heads, keys)
        return normal(problem.dtype, q, (*kv, width), (*kv, v_width))

    def bind(self, inputs: Inputs, problem: Problem, config: Layout) -> Path:
        launch = attention_forward(Launcher(_call(inputs, problem)), config)
        return lambda inputs: launch(*inputs, None, None)[0]

    def paths(self, inputs: Inputs, problem: Problem) -> Mapping[str, Path]:
        stock = reference.attention(_call(inputs, problem))
        return {"stock": lambda inputs: stock(*inputs, None, None)[0]}


def _call(inputs: Inputs, problem: Problem) -> AttentionCall:
    q, k, v = map(Spec.of, inputs)
    return AttentionCall(q, (k,), (v,), Scores(problem.shape[5] ** -0.5, problem.causal))
