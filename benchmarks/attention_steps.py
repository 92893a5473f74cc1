"""A step of decoding over caches of so many keys, in each way to spread it over threads.

Each time is that of one of a chain of 28, compiled and fed by the one before, over caches in
rotation that no processor's cache holds. Half of a tail counts beside them. The heuristic's
configuration is marked; 0 splits are one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.core as mx
from attention_decoding import GPU, HEADS, LAYERS, make_caches
from common import Table, measure

from mlx_qlayers import backend
from mlx_qlayers.dispatch.tunable import AttentionStepProblem
from mlx_qlayers.metal.attention.layout import rounded
from mlx_qlayers.metal.attention.step import Step, attention_step
from mlx_qlayers.options import Rotation
from mlx_qlayers.reference import attention_step as reference
from mlx_qlayers.runtime.cuda_ahead import together
from mlx_qlayers.runtime.spec import Spec

KEYS = (16, 1024, 4096, 16384, 32768) if GPU else (16, 600)
SPLITS = (0, 8, 16, 22, 32, 48, 64) if GPU else (0, 4)
# What a cache grows by, which is what its tail holds.
_ROWS = 256
# A threadgroup with more tiles than these is not worth a measurement.
_MOST_TILES = 40


def problem_of(keys: int) -> AttentionStepProblem:
    """The tuner's problem of a cache that has just grown."""
    batch, heads, kv_heads, width = HEADS
    size = rounded(keys + _ROWS)
    return AttentionStepProblem(mx.bfloat16, batch, heads, kv_heads, size, width, width)


def kinds(problem: AttentionStepProblem) -> Iterator[Step]:
    """Ways to spread a threadgroup's work, without a number of splits."""
    for blocks in (1, 2):
        for slice in (16, 32, 64):
            config = problem.completed(Step(1, 1, blocks, slice))
            if problem.why_not(config) is None:
                yield config


def rows(keys: int, repeats: int) -> Iterator[dict[str, object]]:
    """Verify and measure every kind with every number of splits."""
    batch, heads, kv_heads, width = HEADS
    problem, rotation = problem_of(keys), Rotation(width)
    caches = make_caches(keys + _ROWS, mx.bfloat16, 0)
    tails = [mx.random.normal((batch, kv_heads, _ROWS, width)).astype(mx.bfloat16) for _ in "kv"]
    q, k, v = (
        mx.random.normal((batch, 1, n * width)).astype(mx.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    )
    held = _ROWS // 2
    positions = mx.array([keys, held, *[keys + held] * max(6, batch)], mx.int32)
    first = [q, k, v, *caches[0], *tails, positions]
    specs = [*map(Spec.of, first), None, None]
    truth = reference.attention_step(specs, width**-0.5, rotation)(*first, None, None)[0]

    def chain(config: Step) -> Callable[[], mx.array]:
        launch = attention_step(specs, width**-0.5, rotation, config)

        def run(x: mx.array, *caches: mx.array) -> mx.array:
            for i in range(LAYERS):
                at = 2 * i % len(caches)
                x = launch(x, k, v, *caches[at : at + 2], *tails, positions, None, None)[0]
            return x

        error = mx.abs(launch(*first, None, None)[0] - truth).max() / mx.abs(truth).max()
        if not error.item() < 0.02:
            raise SystemExit(f"{config} is off by {error.item():.2g}")
        flat = [array for cache in caches for array in cache]
        compiled = mx.compile(run) if GPU else run
        return lambda: compiled(q, *flat)

    heuristic = problem.heuristic(backend())
    found = {
        replace(kind, splits=n)
        for kind in kinds(problem)
        for n in SPLITS
        if n * kind.tile <= max(2 * keys, 512) and keys / max(n, 1) <= _MOST_TILES * kind.tile
    }
    with together():  # compiled side by side
        for config in {replace(each, splits=min(each.splits, 1)) for each in found}:
            attention_step(specs, width**-0.5, rotation, config)
    times = measure({str(c): chain(c) for c in {*found, heuristic}}, repeats=repeats, least=0.01)
    for kind in sorted({replace(each, splits=0) for each in {*found, heuristic}}, key=str):
        row: dict[str, object] = {"keys": keys}
        row |= {name: getattr(kind, name) for name in ("slice", "simds", "blocks")}
        of_splits = {c.splits: times[str(c)] for c in found if replace(c, splits=0) == kind}
        row |= {f"{n} splits": of_splits[n].scaled(1e6 / LAYERS) for n in sorted(of_splits)}
        if replace(heuristic, splits=0) == kind:
            row["heuristic"] = times[str(heuristic)].scaled(1e6 / LAYERS)
        yield row


def step_table(repeats: int) -> Table:
    """Measure and print microseconds a step."""
    columns = {"keys": 6, "slice": 5, "simds": 5, "blocks": 6, "heuristic": 13}
    table = Table(columns | {f"{n} splits": 12 for n in SPLITS})
    mx.random.seed(0)
    table.print_header()
    for keys in KEYS:
        for row in rows(keys, repeats):
            table.add(**row)
    return table
