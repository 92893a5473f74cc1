"""Decoding with Qwen2-7B's shape by MLX's own settings of CUDA graphs and commits.

    python benchmarks/bench_decode_settings.py
    python benchmarks/bench_decode_settings.py --tiny --settings MLX_MAX_OPS_PER_BUFFER=20

MLX reads them once, so each has a process of its own, by default MLX's. All start together; the
first compiles the kernels, which the others then have from its files, and they decode one after
the other, so that nothing else runs meanwhile. Weights are random; nothing is verified here.
Printed are tokens a second in mlx-lm's loop, at each context, and what a token's graph takes to
build, to submit and to wait for, none of it overlapping, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

SETTINGS = (
    "",
    "MLX_USE_CUDA_GRAPHS=0",
    "MLX_MAX_OPS_PER_BUFFER=25",
    "MLX_MAX_OPS_PER_BUFFER=50",
    "MLX_MAX_OPS_PER_BUFFER=1000 MLX_MAX_MB_PER_BUFFER=100000",
    "MLX_USE_CUDA_GRAPHS=0 MLX_MAX_OPS_PER_BUFFER=1000 MLX_MAX_MB_PER_BUFFER=100000",
    "MLX_CUDA_GRAPH_CACHE_SIZE=4000",
)


def child(args: argparse.Namespace) -> None:
    """Answer the lines that :func:`main` writes: ``build``, then ``run`` and a context."""
    import mlx.core as mx
    from decoding_model import QWEN2_7B, TINY
    from mlx.utils import tree_map
    from mlx_lm.models import qwen2
    from recorded_gpu import without_numbers
    from token_breakdown import anatomy

    from mlx_qlayers import convert_model
    from mlx_qlayers.runtime import cuda_ahead

    def numbers(x: mx.array) -> mx.array:
        if x.dtype == mx.uint32:
            return mx.random.randint(0, 2**31, x.shape, mx.uint32)
        return mx.random.normal(x.shape, x.dtype, scale=0.01)

    def answer(**facts: Any) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    # What is printed meanwhile goes to the errors.
    answers, sys.stdout = sys.stdout, sys.stderr
    shape = TINY if args.tiny else QWEN2_7B
    for line in sys.stdin:
        what, *rest = line.split()
        if what == "build":
            kinds = qwen2.ModelArgs("qwen2", rms_norm_eps=1e-6, tie_word_embeddings=False, **shape)
            model = without_numbers(qwen2.Model(kinds))
            model.update(tree_map(numbers, model.parameters()))
            mx.eval(model.parameters())
            convert_model(model, verify=False, calibrate=False)
            with cuda_ahead.together():
                anatomy(model, mx.zeros((1, 16), mx.int32), 4)
            for context in args.contexts:
                speed(model, context, 8)
            answer(settings=args.child)
        else:
            (context,) = map(int, rest)
            speed(model, context, 16)
            seconds = [speed(model, context, args.tokens) for _ in range(args.repeats)]
            parts = anatomy(model, mx.zeros((1, 16), mx.int32), 24)
            answer(seconds=seconds, parts=[parts.build, parts.submit, parts.wait])


def speed(model: Any, context: int, tokens: int) -> float:
    """Seconds a token behind so many random keys."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from verified_model import filled

    cache = filled(model, context)
    steps = generate_step(mx.array([1]), model, max_tokens=tokens + 2, prompt_cache=cache)
    next(steps), next(steps)
    start = time.perf_counter()
    for _ in steps:
        pass
    return (time.perf_counter() - start) / tokens


def started(args: argparse.Namespace) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process for each setting; none of the settings is inherited."""
    names = {word.partition("=")[0] for setting in SETTINGS for word in setting.split()}
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    for setting in args.settings:
        command = [sys.executable, __file__, "--child", setting or "MLX's own", *sys.argv[1:]]
        yield (
            setting or "MLX's own",
            subprocess.Popen(
                command,
                env=inherited | dict(word.split("=") for word in setting.split()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ),
        )


def asked(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    """What a process answers; empty if it ended."""
    tell(process, line)
    assert process.stdout is not None
    found = process.stdout.readline()
    return json.loads(found) if found else {}


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to a process that may have ended."""
    assert process.stdin is not None
    try:
        print(line, file=process.stdin, flush=True)
    except BrokenPipeError:
        return


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS], help="names and values")
    parser.add_argument("--contexts", nargs="+", type=int, default=[16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try this out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    processes = dict(started(args))
    try:
        ready = {}
        for setting, process in processes.items():
            ready[setting] = asked(process, "build") if not ready else tell(process, "build")
        print(f"{time.perf_counter() - start:.1f} s: the first is ready", flush=True)
        print(f"{'context':>7} {'tokens/s':>9} {'least':>7} {'most':>7}  build submit wait us")
        for i, (setting, process) in enumerate(processes.items()):
            for context in args.contexts:
                if i and context == args.contexts[0]:
                    assert process.stdout is not None
                    process.stdout.readline()  # that it is ready
                if not (found := asked(process, f"run {context}")):
                    print(f"{setting}: ended with {process.wait()}", flush=True)
                    break
                speeds = sorted(1 / each for each in found["seconds"])
                parts = " ".join(f"{1e6 * each:.0f}" for each in found["parts"])
                middle = speeds[len(speeds) // 2]
                row = f"{context:>7} {middle:>9.1f} {speeds[0]:>7.1f} {speeds[-1]:>7.1f}  {parts}"
                print(f"{row}  {setting}  ({time.perf_counter() - start:.1f} s)", flush=True)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
