"""Attention of few queries over a long cache, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import unwrap
from typing import cast

import mlx.core as mx

from ...metal.attention import decode as metal
from ...metal.attention.decode import Decode, Packed
from ...reference import attention as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Problem
from ..lookup import rounded
from ..moves import Axis, Group, GroupTop, Local, Unroll, Upcast
from .packed import Path

# Elements of a group of packed keys and values.
_GROUP = 64


class AttentionDecode(Family[Decode]):
    """One query for each of so many rows over the keys of so many caches.

    Its shape is (caches, rows, keys, D, Dv): caches are those of the batch and of all key heads,
    rows the queries of one of them. Its form is ``bits-0`` for keys and values in the dtype of the
    queries, ``bits-4`` and ``bits-8`` for packed ones.
    """

    name = "attention_decode"
    configs = (Decode,)
    kernels = (
        metal._kernel(False, False, False, False),
        metal._kernel(False, True, False, False),
        metal._combine(False),
    )
    axes = (
        Axis(GroupTop, "stretch", (16, 32, 64, 128, 256, 512)),
        Axis(GroupTop, "most", (16, 32, 64, 128, 256)),
        Axis(Group, "slice", (16, 32, 64)),
        Axis(Unroll, "blocks", (1, 2, 4)),
        Axis(Upcast, "columns", (1, 2, 4, 8)),
        Axis(Local, "combine", (4, 8, 16)),
    )

    def heuristic(self, problem: Problem, device: str) -> Decode:
        caches, rows, keys, width, v_width = problem.shape
        choose = unwrap(metal._configure)
        bits = _bits(problem)
        found = choose(device, problem.dtype, rows, width, v_width, bits, caches, keys)
        return cast(Decode, found)

    def completed(self, config: Decode, problem: Problem) -> Decode:
        return replace(config, simds=-(-problem.shape[4] // config.slice))

    def why_not(self, config: Decode, problem: Problem) -> str | None:
        _, rows, _, width, _ = problem.shape
        if config.columns > max(1, -(-rows // 8)):
            return f"{config.columns} columns of 8 rows for {rows}"
        if config.columns * config.slice > 256:
            return f"{config.columns * config.slice} sums a lane"
        memory = metal._memory(
            T=problem.dtype,
            D=width,
            columns=config.columns,
            simds=config.simds,
            blocks=config.blocks,
            run=config.run,
        )
        if memory > MAX_THREADGROUP_MEMORY:
            return f"{memory} bytes of threadgroup memory"
        if config.stretch < config.tile and config.stretch != 16:
            return f"stretches of {config.stretch} keys are those of {config.tile}"
        return None

    def inputs(self, problem: Problem) -> list[mx.array]:
        caches, rows, keys, width, v_width = problem.shape
        bits, dtype = _bits(problem), problem.dtype
        q = mx.random.normal((1, caches * rows, 1, width)).astype(dtype)
        k, v = (mx.random.normal((1, caches, keys, n)).astype(dtype) for n in (width, v_width))
        if not bits:
            return [q, k, v]
        return [q, *mx.quantize(k, _GROUP, bits), *mx.quantize(v, _GROUP, bits)]

    def run(self, inputs: list[mx.array], problem: Problem, config: Decode) -> mx.array:
        q, k, v = _three(inputs)
        return metal.attention_decode(q, k, v, q.shape[3] ** -0.5, None, None, None, None, config)

    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        bits = _bits(problem)
        q, k, v = (
            (mx.dequantize(*a, _GROUP, bits) if isinstance(a, tuple) else a).astype(mx.float32)
            for a in _three(inputs)
        )
        caches, rows, _, width, v_width = problem.shape
        scores = q.reshape(caches, rows, width) @ k[0].swapaxes(1, 2) * width**-0.5
        return (mx.softmax(scores, axis=-1) @ v[0]).reshape(1, caches * rows, 1, v_width)

    def paths(self, problem: Problem) -> Mapping[str, Path]:
        def stock(inputs: list[mx.array]) -> mx.array:
            q, k, v = _three(inputs)
            return reference.attention(q, k, v, q.shape[3] ** -0.5, None, None, None, None)

        return {"stock": stock}

    def registers(self, config: Decode, problem: Problem) -> int:
        return 48 + config.columns * config.slice // 2 + 4 * config.blocks * config.columns

    def part(self, problem: Problem) -> tuple[Problem, float]:
        caches, *shape = problem.shape
        return replace(problem, shape=(1, *shape)), float(caches)

    def asked(
        self,
        dtype: mx.Dtype,
        rows: int,
        width: int,
        v_width: int,
        bits: int,
        caches: int,
        keys: int,
    ) -> Problem:
        return Problem((caches, rows, keys, width, v_width), dtype, f"bits-{bits}")

    def bucket(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        caches, rows, keys, width, v_width = shape
        return caches, rows, rounded(keys), width, v_width


def _bits(problem: Problem) -> int:
    return int(problem.form.removeprefix("bits-"))


def _three(inputs: list[mx.array]) -> tuple[mx.array, mx.array | Packed, mx.array | Packed]:
    """Queries, keys and values, the latter of one array or of three."""
    q, *rest = inputs
    if len(rest) == 2:
        return q, rest[0], rest[1]
    return q, (rest[0], rest[1], rest[2]), (rest[3], rest[4], rest[5])


ATTENTION_DECODE = AttentionDecode()
