"""Configurations of qmm_skinny, and qmv, for the products of a 7B model's layers on an H200.

    python benchmarks/bench_skinny.py --store mlx_qlayers/dispatch/data/sm_90.json

Times are those of kernels, by CUPTI (which needs PyTorch), each product by itself, as in a step of
a model, where it waits for the one before; matrices come from memory, and a second launch counts
1.5 us more. Each result is compared with that of the dense product first. ``--store`` replaces
what the entry ``qmm_skinny_spread`` of a file of results says of these matrices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import print_facts, store
from kernel_times import kernel_times

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmm_skinny import SkinnyConfig, skinny_memory
from mlx_qlayers.metal.quantized_matmul.qmv import Launch, QmvArrays, qmv
from mlx_qlayers.metal.quantized_matmul.qmv_config import QmvMatrixConfig, qmv_config
from mlx_qlayers.runtime.cuda_ahead import together
from mlx_qlayers.runtime.limits import CUDA_THREADGROUP_MEMORY
from mlx_qlayers.runtime.spec import Spec

FORMAT, DTYPE, HIDDEN = Format(64, 4), mx.bfloat16, 3584
# Rows of the matrices, their columns, and copies that together exceed the cache.
SHAPES = {
    "down": ((HIDDEN,), 18944, 6),
    "out": ((HIDDEN,), HIDDEN, 24),
    "gate": ((18944, 18944), HIDDEN, 3),
    "qkv": ((HIDDEN, 512, 512), HIDDEN, 24),
    "head": ((152064,), HIDDEN, 1),
}
# Seconds between two launches of a graph of which one waits for the other.
GAP = 1.5e-6
# By the rows that are measured, up to how many rows that counts.
ROWS = {17: 24, 16: 16, 32: 32, 64: 64}
# fragments, run, tiles, sides, shares, stages, resident, turns, together, chunk, cover, deep
Values = tuple[int, ...]


def staying(deep: int, *spreads: tuple[int, ...], run: int = 32) -> tuple[Values, ...]:
    """Those in which windows of x stay: fragments, tiles, sides, shares, turns."""
    return tuple((f, run, t, s, h, 0, 1, n, 0, 2, 64 // run, deep) for f, t, s, h, n in spreads)


NARROW: dict[int, tuple[Values, ...]] = {
    16: (
        *((2, 32, 1, 2, 8, 1, 1, 2, 0, 2, 2, 1), (2, 32, 1, 2, 4, 2, 1, 2, 0, 2, 2, 1)),
        *((2, 32, 2, 1, 5, 2, 1, 2, 0, 2, 2, 1), (2, 32, 1, 2, 5, 1, 1, 2, 0, 2, 2, 2)),
    ),
    17: (
        *((2, 32, 2, 2, 4, 1, 1, 2, 0, 2, 2, 1), (2, 32, 2, 2, 4, 2, 1, 2, 0, 2, 2, 1)),
        *((2, 32, 1, 4, 4, 1, 1, 2, 0, 2, 2, 1), (3, 32, 2, 1, 7, 1, 1, 2, 0, 3, 2, 1)),
    ),
    32: (
        *((2, 32, 2, 2, 4, 1, 1, 2, 0, 2, 2, 1), (2, 32, 2, 2, 4, 2, 1, 2, 0, 2, 2, 1)),
        *((4, 32, 1, 2, 5, 1, 1, 2, 0, 4, 2, 1), (2, 32, 1, 4, 4, 1, 1, 2, 0, 2, 2, 1)),
    ),
    64: (
        *((4, 16, 1, 4, 4, 2, 1, 2, 1, 4, 4, 1), (4, 32, 1, 4, 2, 2, 2, 2, 1, 4, 2, 1)),
        *((4, 16, 1, 4, 2, 2, 2, 2, 1, 4, 4, 2), (4, 16, 1, 4, 3, 2, 1, 2, 1, 4, 4, 1)),
    ),
}
DOWN = {
    16: (*NARROW[16][:1], *staying(30, (2, 1, 9, 2, 2)), *staying(37, (2, 2, 4, 4, 2))),
    17: (
        *NARROW[17][-1:],
        *staying(30, (3, 1, 9, 2, 2), (3, 1, 9, 2, 3), (3, 1, 9, 1, 4)),
        *staying(37, (3, 1, 7, 2, 2), (3, 1, 7, 2, 4)),
    ),
    32: (
        *NARROW[32][:1],
        *staying(25, (4, 1, 11, 1, 2), (4, 1, 11, 1, 4)),
        *staying(19, (4, 1, 14, 1, 2), (4, 1, 14, 1, 3), (4, 2, 7, 2, 2)),
    ),
    64: NARROW[64],
}
OUT = {
    rows: (*each, *staying(28, *((f, 1, 2, 8, 2), (f, 1, 2, 7, 2), (f, 1, 2, 7, 4))))
    for (rows, each), f in zip(NARROW.items(), (2, 3, 4, 8), strict=True)
    if rows < 64
} | {64: NARROW[64]}
THREE: dict[int, tuple[Values, ...]] = {
    16: (
        *((2, 32, 1, 3, 5, 1, 1, 2, 0, 2, 2, 1), (2, 32, 1, 3, 5, 1, 1, 2, 0, 2, 2, 2)),
        *staying(28, (2, 1, 3, 5, 3), (2, 1, 3, 7, 2), (2, 1, 3, 5, 2)),
    ),
    17: (
        *((3, 32, 1, 3, 5, 1, 1, 2, 0, 2, 2, 1), (3, 32, 1, 3, 5, 1, 1, 2, 0, 3, 2, 1)),
        *((2, 32, 2, 3, 3, 1, 1, 2, 0, 2, 2, 1), (2, 32, 2, 2, 4, 1, 1, 2, 0, 2, 2, 1)),
    ),
    32: (
        *((4, 32, 1, 3, 5, 1, 1, 2, 0, 2, 2, 1), (4, 32, 3, 1, 5, 1, 1, 2, 0, 2, 2, 1)),
        *((2, 32, 2, 3, 3, 1, 1, 2, 0, 2, 2, 1), (2, 32, 2, 2, 4, 1, 1, 2, 0, 2, 2, 1)),
    ),
    64: (
        *((4, 32, 1, 8, 2, 1, 1, 2, 1, 2, 2, 1), (4, 16, 1, 8, 2, 2, 1, 2, 1, 4, 4, 1)),
        *((4, 16, 1, 8, 2, 1, 1, 2, 1, 4, 4, 2), (8, 16, 1, 4, 2, 2, 1, 2, 1, 2, 4, 1)),
        (4, 32, 1, 4, 2, 2, 2, 2, 1, 4, 2, 1),
    ),
}
WIDE: dict[int, tuple[Values, ...]] = {
    **{
        rows: (
            (f, 32, 2, 9, 1, 2, 1, 2, 0, f, 2, 8 // f),
            *staying(28, (f, 1, 18, 1, 2), (f, 1, 18, 1, 4), (f, 2, 9, 1, 2)),
            *staying(56, (f, 1, 18, 1, 4), run=16),
        )
        for rows, f in ((16, 2), (17, 3), (32, 4))
    },
    64: (
        *((8, 16, 1, 20, 1, 2, 1, 2, 1, 4, 4, 2), (8, 16, 1, 20, 1, 2, 1, 2, 1, 4, 4, 1)),
        *((8, 32, 1, 20, 1, 2, 1, 2, 1, 4, 2, 1), (8, 16, 1, 8, 1, 2, 2, 2, 1, 4, 4, 2)),
        (8, 32, 1, 12, 1, 2, 1, 2, 1, 4, 2, 1),
    ),
}
TABLES = {"down": DOWN, "out": OUT, "qkv": THREE, "gate": WIDE, "head": WIDE}


def candidates(what: str, rows: int) -> Iterator[SkinnyConfig | QmvMatrixConfig]:
    """What is measured; qmv as it would be taken."""
    for *sizes, joint, chunk, cover, deep in TABLES[what][rows]:
        config = SkinnyConfig(*sizes, bool(joint), chunk, cover, deep)
        if config.shared or skinny_memory(**asdict(config)) <= CUDA_THREADGROUP_MEMORY:
            yield config
    if rows <= 16:
        (*sizes,), k, *_ = SHAPES[what]
        config = qmv_config("cuda", rows, sum(sizes), k, DTYPE, FORMAT)
        if isinstance(config, QmvMatrixConfig):
            yield config


def of_all(what: str, rows: int, array: Callable[..., Any], matrices: list[Any]) -> QmvArrays:
    """The arrays of a product, or their specs: what is added to it, or the squares of a norm."""
    x = array((rows, SHAPES[what][1]), DTYPE)
    given = QmvArrays(x)._replace(**dict(zip(QmvArrays._fields[5:], matrices, strict=False)))
    if what in ("down", "out"):
        added, weight = array((rows, HIDDEN), DTYPE), array((HIDDEN,), DTYPE)
        return given._replace(residual=added, next_weight=weight)
    if what == "head":
        return given
    return given._replace(tile_squares=array((rows, SHAPES[what][1] // 16), mx.float32))


def specs(what: str) -> list[Any]:
    (*sizes,), k, *_ = SHAPES[what]
    of = [((n, k // 8), mx.uint32) for n in sizes], [((n, k // 64), DTYPE) for n in sizes]
    words, numbers = ([Spec(*s) for s in each] for each in of)
    return [a for w, s in zip(words, numbers, strict=True) for a in (w, s, s, None)]


def made(what: str) -> list[Any]:
    """Packed matrices of random weights of unit variance, more or less."""
    (*sizes,), k, *_ = SHAPES[what]
    arrays: list[Any] = []
    for n in sizes:
        scale = (mx.random.uniform(0.5, 1, (n, k // 64)) / 4 * k**-0.5).astype(DTYPE)
        arrays += [mx.random.randint(0, 2**32 - 1, (n, k // 8), mx.uint32), scale, -8 * scale, None]
    return arrays


def spent(launch: Launch, given: QmvArrays, matrices: list[list[Any]]) -> float:
    """Seconds of a product."""
    turns = cycle(matrices)
    kernels = kernel_times(lambda: mx.eval(launch(*of_matrices(given, next(turns)))), 6)
    launches = sum(count for _, count, _ in kernels)
    return sum(seconds for *_, seconds in kernels) + GAP * (launches - 1)


def of_matrices(given: QmvArrays, matrices: list[Any]) -> QmvArrays:
    return given._replace(**dict(zip(QmvArrays._fields[5:], matrices, strict=False)))


def dense(what: str, given: QmvArrays) -> mx.array:
    """The first result, by dense products. Squares are those of rows whose norm is one."""
    one, two = (
        mx.zeros(1) if m is None else given.x @ mx.dequantize(*m[:3], *FORMAT[:2]).T
        for m in (given.matrices[0], given.matrices[1] if what == "gate" else None)
    )
    return one * mx.sigmoid(one) * two if what == "gate" else one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, help="a file of results, as in dispatch/data")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing begins")
    args = parser.parse_args()
    print_facts()
    begun = time.perf_counter()
    jobs = []
    with together():
        for rows in args.rows:
            for what in args.shapes:
                epsilon = 1e-6 if what in ("gate", "qkv") else None
                gate: Any = "silu" if what == "gate" else None
                given = of_all(what, rows, Spec, specs(what))
                for config in candidates(what, rows):
                    launch = qmv(given, FORMAT, config, epsilon=epsilon, gate=gate)
                    jobs.append((rows, what, config, launch))
    matrices = {what: [made(what) for _ in range(SHAPES[what][2])] for what in args.shapes}
    mx.eval([a for several in matrices.values() for m in several for a in m if a is not None])
    print(f"{len(jobs)} kernels after {time.perf_counter() - begun:.0f} s", flush=True)
    best: dict[tuple[int, str], tuple[float, Any]] = {}
    truth: dict[tuple[int, str], Any] = {}
    for rows, what, config, launch in jobs:
        if time.perf_counter() - begun > args.seconds:
            break
        key = rows, what
        if key not in truth:
            given = of_all(what, rows, mx.zeros, matrices[what][0])
            x = mx.random.normal(given.x.shape).astype(DTYPE)
            given = given._replace(x=x)
            if given.tile_squares is not None:
                given = given._replace(tile_squares=mx.full(given.tile_squares.shape, 16.0))
            truth[key] = given, dense(what, given).astype(mx.float32)
        given, expected = truth[key]
        error = mx.abs(launch(*given)[0].astype(mx.float32) - expected).max() / expected.max()
        if error.item() > 0.03:
            raise SystemExit(f"{rows} rows, {what}: {config} is wrong by {error.item():.3f}")
        took = spent(launch, given, matrices[what])
        best[key] = min(best.get(key, (took, config)), (took, config), key=lambda each: each[0])
        name = "qmv" if isinstance(config, QmvMatrixConfig) else f"{astuple(config)}"
        print(f"{rows:3d} rows {what:5s} {took * 1e6:7.1f} us  {name}", flush=True)
    values = {}
    for (rows, what), (took, config) in best.items():
        (*sizes,), k, *_ = SHAPES[what]
        spread = "qmv" if isinstance(config, QmvMatrixConfig) else list(astuple(config))
        values[f"{ROWS[rows]} {sum(sizes)}x{k} affine 64 4"] = spread
        print(f"best: {rows:3d} rows {what:5s} {took * 1e6:7.1f} us  {spread}")
    if args.store:
        entry = json.loads(args.store.read_text())["entries"]["qmm_skinny_spread"]
        entry |= {"values": dict(sorted((entry["values"] | values).items()))}
        store(args.store, {"qmm_skinny_spread": entry | {"date": f"{datetime.now(UTC):%Y-%m-%d}"}})


if __name__ == "__main__":
    main()
