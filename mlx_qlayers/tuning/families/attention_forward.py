"""Attention of many queries, forward, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from ...metal.attention import forward as metal
from ...metal.attention.forward import Arrays, Call, Scores
from ...metal.attention.layout import Layout, layout, memory, registers
from ...reference import attention as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Problem
from ..lookup import rounded
from ..moves import Axis, Buffer, Group, Local, Tile, Upcast
from .packed import Path

# Beyond these a thread's operands and sums leave no room for addresses.
_MOST_REGISTERS = 160


class AttentionForward(Family[Layout]):
    """Attention without a mask but the causal one.

    Its shape is (B, H, Hkv, L, S, D, Dv); its form is ``causal`` or ``full``.
    """

    name = "attention_forward"
    configs = (Layout,)
    kernels = (metal._FORWARD,)
    axes = (
        Axis(Upcast, "blocks", (1, 2)),
        Axis(Local, "simds", (2, 4, 8)),
        Axis(Group, "slices", (1, 2, 4)),
        Axis(Tile, "tile", (16, 32, 64, 128)),
        Axis(Buffer, "alternate", (False, True)),
        Axis(Buffer, "ahead", (False, True)),
    )

    def heuristic(self, problem: Problem, device: str) -> Layout:
        return layout("forward", device, problem.dtype, max(problem.shape[5:]))

    def why_not(self, config: Layout, problem: Problem) -> str | None:
        if config.threads > 1024:
            return f"{config.threads} threads"
        *_, width, v_width = problem.shape
        values = {"T": problem.dtype, "D": width, "DV": v_width, **config.template()}
        if (used := memory("forward", values)) > MAX_THREADGROUP_MEMORY:
            return f"{used} bytes of threadgroup memory"
        found = registers("forward", values)
        return f"{found} registers" if found > _MOST_REGISTERS else None

    def inputs(self, problem: Problem) -> list[mx.array]:
        batch, heads, kv_heads, queries, keys, width, v_width = problem.shape
        shapes = (
            (batch, heads, queries, width),
            (batch, kv_heads, keys, width),
            (batch, kv_heads, keys, v_width),
        )
        return [mx.random.normal(shape).astype(problem.dtype) for shape in shapes]

    def run(self, inputs: list[mx.array], problem: Problem, config: Layout) -> mx.array:
        arrays = Arrays(*inputs)
        scores = Scores(arrays.q.shape[3] ** -0.5, causal=problem.form == "causal")
        return metal.attention_forward(Call(arrays, scores), arrays, config)[0]

    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        return self.paths(problem)["stock"]([a.astype(mx.float32) for a in inputs])

    def paths(self, problem: Problem) -> Mapping[str, Path]:
        mask = "causal" if problem.form == "causal" else None

        def stock(inputs: list[mx.array]) -> mx.array:
            q, k, v = inputs
            return reference.attention(q, k, v, q.shape[3] ** -0.5, mask, None, None, None)

        return {"stock": stock}

    def registers(self, config: Layout, problem: Problem) -> int:
        *_, width, v_width = problem.shape
        values = {"T": problem.dtype, "D": width, "DV": v_width, **config.template()}
        return 32 + registers("forward", values)

    def part(self, problem: Problem) -> tuple[Problem, float]:
        batch, heads, _, *shape = problem.shape
        return replace(problem, shape=(1, 1, 1, *shape)), float(batch * heads)

    def asked(self, shape: tuple[int, ...], dtype: mx.Dtype, causal: bool) -> Problem:
        return Problem(shape, dtype, "causal" if causal else "full")

    def bucket(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, heads, kv_heads, queries, keys, *widths = shape
        return batch, heads, kv_heads, rounded(queries), rounded(keys), *widths


ATTENTION_FORWARD = AttentionForward()
