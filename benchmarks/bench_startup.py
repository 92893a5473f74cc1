"""The times that a user waits for: conversion, first token, first long prompt, calibration.

    python benchmarks/bench_startup.py
    python benchmarks/bench_startup.py --tiny

Two processes one after the other, of which the first finds empty caches; in them a model of
Qwen2-7B's shape has few layers, as what is compiled depends on their kinds, not on their number.
A third one calibrates all layers, with the results of tuning that ship with the package left out
and empty caches, and decodes with what that found, then with what ships, then with neither. The
weights are random. A process that takes too long is ended, and what it measured counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any
from unittest import mock

import mlx.core as mx
from common import Table, arguments, output, positive
from decoding_model import QWEN2_7B, TINY, build, decode, prefill
from harness import seconds

from mlx_qlayers import convert_model
from mlx_qlayers.measurements import entries
from mlx_qlayers.runtime import cuda_ahead
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.tuning.calibrate import calibrate

BATCHES = (1, 8)
# Layers of the first two processes, and tokens that the third decodes at a time.
LAYERS, TOKENS = 4, 64
_SHORT, _LONG = 5, 900
_REPEATS = 3


def tell(what: str, value: float, unit: str = "s") -> None:
    """A line for the process that collects them."""
    print(f"result\t{what}\t{value}\t{unit}", flush=True)


def phase(what: str, run: Callable[[], Any]) -> None:
    """Tell how long a call takes, and what was compiled meanwhile."""
    here = set(cuda_ahead.seconds)
    tell(what, seconds(run))
    if found := [s for name, s in cuda_ahead.seconds.items() if name not in here]:
        tell(f"  {len(found)} kernels compiled ahead, longest", max(found))


def start_up(shape: dict[str, int], begun: float) -> None:
    """Conversion, the first token of a short prompt, and then a long prompt, from the start."""
    tell("start of Python and MLX", time.time() - begun)
    models: list[Any] = []
    phase("stock model", lambda: models.append(build(shape, 64, 4)))
    model = models[0]
    # MLX compiles what a process does first: without that, it would count as ours.
    phase("a random number", lambda: mx.eval(mx.random.randint(0, 9, (4,)).argmax()))
    phase("conversion", lambda: print(convert_model(model).calibration, flush=True))
    phase(f"first token of {_SHORT}", partial(decode, model, [[1] * _SHORT], 1))
    phase("20 tokens after that", partial(decode, model, [[1] * _SHORT], 20))
    phase(f"prompt of {_LONG}", partial(prefill, model, mx.zeros((_LONG,), mx.int32)))


def calibrated(shape: dict[str, int]) -> None:
    """Decoding by calibration in place of shipped results, by those, and by neither."""
    model = build(shape, 64, 4)
    read = entries.read

    def without(*sources: str) -> Callable[..., dict[str, Any]]:
        """Results of such sources left out, but for the thresholds that belong to heuristics."""

        def some(folder: Path, device: str) -> dict[str, Any]:
            source = "shipped" if folder == entries.SHIPPED else "calibrated"
            entry = read(folder, device)
            if source not in sources:
                return entry
            return {key: e for key, e in entry.items() if e.values is not None}

        return some

    ways = {
        "calibrated": without("shipped"),
        "shipped": without("calibrated"),
        "neither": without("shipped", "calibrated"),
    }
    for name, some in ways.items():
        with mock.patch.object(entries, "read", some):
            advance_epoch()
            if name == "calibrated":
                convert_model(model, verify=False, calibrate=False)
                tell("calibration", seconds(lambda: print(calibrate(model, 10.0), flush=True)))
            for batch in BATCHES:
                tell(f"{name}, batch {batch}", speed(model, batch), "tokens/s")


def speed(model: Any, batch: int) -> float:
    """Tokens a second, of the best of some runs."""
    prompts = [[1 + i] * 16 for i in range(batch)]
    decode(model, prompts, 4)
    return batch * TOKENS / min(decode(model, prompts, TOKENS) for _ in range(_REPEATS))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can run")
    parser.add_argument("--limit", type=positive, default=45, help="seconds of a start-up process")
    parser.add_argument("--begun", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("start-up", "calibrated"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = dict(TINY if args.tiny else QWEN2_7B)
    if args.part == "start-up":
        start_up(shape | {"num_hidden_layers": LAYERS}, args.begun)
    elif args.part == "calibrated":
        calibrated(shape)
    else:
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Every process in turn; results are printed as they come."""
    table = Table()
    parts = (
        ("first process", "start-up", args.limit),
        ("second process", "start-up", args.limit),
        ("calibration", "calibrated", 2 * args.limit),
    )
    command = [sys.executable, __file__, *["--tiny"] * args.tiny]
    with output(args, "startup"), TemporaryDirectory() as folder:
        caches = empty_caches(folder)
        for process, part, limit in parts:
            start, now = time.perf_counter(), str(time.time())
            run([*command, "--part", part, "--begun", now], caches, limit, table, process)
            table.add(process=process, what="in all", found=time.perf_counter() - start, unit="s")


def empty_caches(folder: str) -> dict[str, str]:
    """The environment of processes that keep what they compile in a folder."""
    names = "MLX_PTX_CACHE_DIR", "MLX_QLAYERS_CACHE_DIR", "CUDA_CACHE_PATH"
    return {name: str(Path(folder) / name) for name in names}


def run(command: list[str], caches: dict[str, str], limit: float, table: Table, name: str) -> None:
    """Run a process to its end or the limit; its results are put into a table as they come."""
    with subprocess.Popen(
        command, env=os.environ | caches, stdout=subprocess.PIPE, text=True
    ) as process:
        timer = Timer(limit, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            kind, *cells = line.rstrip("\n").split("\t")
            if kind == "result":
                what, found, unit = cells
                table.add(process=name, what=what, found=float(found), unit=unit)
            else:
                print(line, end="", flush=True)
        timer.cancel()
    if process.returncode:
        print(f"{name}: ended with {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
