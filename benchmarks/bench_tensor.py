"""The product by tensor operations beside the kernels that operations take on CUDA.

``python benchmarks/bench_tensor.py [--all] [--store FILE]``: bfloat16, 4 bits, groups of 64, each
as it is cut best of some configurations, beside the kernel of tiles, whose results it must give and
which was measured so too; then attention and its gradients. It is for the M5; here the bar is 1.3
times that kernel's time. ``--store`` tells a file of results where it is the fastest path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_int8 import SHAPES, seconds
from common import print_facts, store

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.dispatch.entries import Entry
from mlx_qlayers.dispatch.measurements import configure, heuristics_only
from mlx_qlayers.dispatch.problem import source_hash
from mlx_qlayers.dispatch.products import QmmProblem
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.backward import attention_backward
from mlx_qlayers.metal.attention.forward import Launcher, attention_forward
from mlx_qlayers.metal.attention.tensor import attention_tensor
from mlx_qlayers.metal.quantized_matmul.qmm import QmmConfig, qmm
from mlx_qlayers.metal.quantized_matmul.qmm_skinny import MAX_SKINNY_ROWS
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import TensorConfig, qmm_tensor, tensor_config
from mlx_qlayers.options import AttentionCall, MatmulCall, PackedMatrix, Scores
from mlx_qlayers.runtime.cuda_ahead import together
from mlx_qlayers.runtime.spec import Spec

FMT = Format(64, 4)
# Rows and columns of SIMD groups, the depth of a step, and threadgroups for each multiprocessor.
CUTS = (
    (64, (1, 4), 64, 3),
    (64, (1, 4), 64, 2),
    (128, (1, 4), 64, 2),
    (32, (1, 4), 64, 4),
    (128, (1, 4), 32, 2),
)
ROWS = (64, 512, 2048)
CORES = 132
STEPS = 10

_Launch = Callable[..., mx.array]
_Launches = Callable[..., list[mx.array]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the time of every configuration")
    parser.add_argument("--store", type=Path, help="a file of results, as in dispatch/data")
    args = parser.parse_args()
    every, entries = args.all, dict[str, Any]()
    print_facts()
    with use_backend("cuda"):
        shapes = [(rows, n, k) for rows in ROWS for n, k in SHAPES]
        with together():
            launches = [prepared(*shape) for shape in shapes]
            attentions = [prepared_attention(length) for length in ROWS[1:]]
        for shape, paths in zip(shapes, launches, strict=True):
            text, times = row(*shape, *paths, every)
            print(text, flush=True)
            if times["tensor"] == min(times.values()):
                problem = QmmProblem(*shape, mx.bfloat16, FMT, True)
                tuned = configure("qmm", "cuda", *shape, mx.bfloat16, FMT, True)
                entries[problem.key] = entry(problem, tuned, times)
        for length, pair in zip(ROWS[1:], attentions, strict=True):
            for text in attention(length, *pair):
                print(text, flush=True)
    if args.store:
        store(args.store, entries)


def entry(problem: QmmProblem, tuned: QmmConfig, times: dict[str, float]) -> dict[str, Any]:
    """What dispatch reads of a problem whose seconds by paths these are."""
    found = Entry(
        asdict(tuned),
        *("tensor", times["tensor"], times["kernel"], 1),
        *(source_hash(*problem.kernels()), version("mlx"), times),
        *(f"{datetime.now(UTC):%Y-%m-%d}", "python benchmarks/bench_tensor.py"),
    )
    return asdict(found)


def configurations(rows: int, n: int, k: int) -> Iterator[TensorConfig]:
    """Those to choose from, the depth shared where threadgroups are few."""
    for height, (simds_m, simds_n), tile_k, resident in CUTS:
        cut = TensorConfig(height, tile_k, simds_m, simds_n, False, 1, resident)
        if cut.tile_m <= rows:
            count = -(-rows // cut.tile_m) * -(-n // cut.tile_n)
            parts = min(CORES * resident // count, k // 1024)
            yield from (replace(cut, parts=n) for n in ((1, parts) if parts > 1 else (1,)))


def prepared(rows: int, n: int, k: int) -> tuple[_Launch, dict[TensorConfig, _Launch]]:
    """The launches of a shape: by tiles, and by tensor operations."""
    groups = Spec((n, k // FMT.group_size), mx.bfloat16)
    packed = PackedMatrix(Spec((n, k * FMT.bits // 32), mx.uint32), groups, groups)
    call = MatmulCall(Spec((rows, k), mx.bfloat16), packed, True, FMT)
    by_tiles = qmm(call, configure("qmm", "cuda", rows, n, k, mx.bfloat16, FMT, True))
    cuts = dict.fromkeys(configurations(rows, n, k))
    return by_tiles, {config: qmm_tensor(call, config) for config in cuts}


def row(
    rows: int,
    n: int,
    k: int,
    by_tiles: _Launch,
    by_tensors: dict[TensorConfig, _Launch],
    every: bool,
) -> tuple[str, dict[str, float]]:
    """The times of one shape, of tensor operations as they are cut best; seconds by paths."""
    x = mx.random.normal((rows, k)).astype(mx.bfloat16)
    packed = mx.quantize(mx.random.normal((n, k)).astype(mx.bfloat16) * k**-0.5, *FMT)
    mx.eval(x, packed)
    times: dict[str, float] = {}
    text = f"{rows} x {n} x {k}:"
    truth = by_tiles(x, *packed, None)
    errors = dict[str, float]()
    for config, run in by_tensors.items():
        name = " ".join(map(str, astuple(config)))
        difference = mx.abs(run(x, *packed, None) - truth).max() / mx.abs(truth).max()
        errors[name] = difference.item()
        times[name] = seconds(partial(run, x, *packed, None)) * 1e6
        if every:
            print(f"{text} {name}: {times[name]:.0f} us, off by {errors[name]:.1e}", flush=True)
    best = min(times, key=times.__getitem__)
    tiles = seconds(partial(by_tiles, x, *packed, None)) * 1e6
    with heuristics_only():
        taken = seconds(partial(quantized_matmul, x, *packed)) * 1e6
    cut = tensor_config(rows, k, x.dtype, FMT, True, device="cuda")
    paths = {"kernel": tiles, "tensor": times.get(" ".join(map(str, astuple(cut))), inf)}
    paths["dequantized" if rows > MAX_SKINNY_ROWS else "qmm_skinny"] = taken
    return (
        f"{text} tensor {times[best]:.0f} us ({best}), qmm {tiles:.0f} us, taken {taken:.0f} us; "
        f"{times[best] / tiles:.2f} times qmm; off by {max(errors.values()):.1e}"
    ), {path: time / 1e6 for path, time in paths.items()}


def prepared_attention(length: int) -> list[tuple[_Launches, _Launches]]:
    """The launches of causal attention of the model's heads: by tensor operations, and by tiles.

    Each with those of the gradients, which are compiled at their first run.
    """
    q, k = (Spec((1, heads, length, 128), mx.bfloat16) for heads in (28, 4))
    at = Launcher(AttentionCall(q, (k,), (k,), Scores(128**-0.5, True)))
    launches = attention_tensor(at), attention_forward(at)
    return [(run, attention_backward(at, run is launches[0])[0]) for run in launches]


def attention(
    length: int, by_tensors: tuple[_Launches, _Launches], by_tiles: tuple[_Launches, _Launches]
) -> Iterator[str]:
    """The times of the forward pass, and of the gradients of q, k and v."""
    q, k, v, d_out = (
        mx.random.normal((1, heads, length, 128)).astype(mx.bfloat16) for heads in (28, 4, 4, 28)
    )
    outputs = by_tiles[0](q, k, v, None, None)
    mx.eval(d_out, outputs)

    def forward(run: _Launches, q: mx.array) -> list[mx.array]:
        return run(q, k, v, None, None)[:1]

    def backward(run: _Launches, d_out: mx.array) -> list[mx.array]:
        return run([q, k, v, None, None], [d_out, None], outputs)[:3]

    for name, step, x, runs in (
        ("attention", forward, q, (by_tensors[0], by_tiles[0])),
        ("gradients", backward, d_out, (by_tensors[1], by_tiles[1])),
    ):
        results = [step(run, x) for run in runs]
        error = max(
            (mx.abs(found - truth).max() / mx.abs(truth).max()).item()
            for found, truth in zip(*results, strict=True)
        )
        times = [several(partial(step, run), x) * 1e6 for run in runs]
        yield (
            f"{name} {length}: tensor {times[0]:.0f} us, by tiles {times[1]:.0f} us; "
            f"{times[0] / times[1]:.2f} times; off by {error:.1e}"
        )


def several(step: Callable[[mx.array], list[mx.array]], x: mx.array) -> float:
    """The time of a step of a compiled function of several, which Python does not hold up."""
    inputs = [x * (1 + i / 64) for i in range(STEPS)]
    mx.eval(inputs)
    run = mx.compile(lambda inputs: [y for x in inputs for y in step(x)])
    return seconds(partial(run, inputs), inner=1) / STEPS


if __name__ == "__main__":
    main()
