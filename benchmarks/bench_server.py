"""Requests of different lengths that arrive one after the other, as at a server.

    python benchmarks/bench_server.py
    python benchmarks/bench_server.py --tiny

mlx-lm's ``BatchGenerator`` takes 48 requests, each a few tokens after the one before, so that the
batch grows to about 19 sequences and shrinks again. The trace is the same for stock mlx-lm and the
converted model: it counts steps, not seconds. Each runs it in a first process, whose caches are
empty; in a second process, which finds what the first one compiled; and there once more, warm.

A user sees the time between two tokens of a sequence, the gap. Those in which a prompt was read
are told apart, and of the others the first of each batch size: a process emits a step for it, and
has done so where it is warm. Weights are random, of Qwen2-7B's shape; the converted model's logits
are held against float32 at the end, since that compiles kernels.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from bench_startup import empty_caches, run, tell
from common import Table, arguments, output, positive
from decoding_model import QWEN2_7B, TINY, build, verify
from mlx_lm.generate import BatchGenerator

from mlx_qlayers import convert_model

REQUESTS, STEPS_APART = 48, 5
PROMPTS, TOKENS = (16, 600), (32, 160)
# Seconds from which a gap is a stall.
STALL = 0.1


def requests(vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens each asks for."""
    draw = random.Random(0)
    return [
        ([draw.randrange(vocabulary) for _ in range(draw.randint(*PROMPTS))], draw.randint(*TOKENS))
        for _ in range(REQUESTS)
    ]


def trace(model: Any, name: str) -> None:
    """Run all requests, and tell what their users saw."""
    pending = requests(model.args.vocab_size)
    generator = BatchGenerator(model)
    count, most, plain, reading = 0, 0, [], []
    begin = last = time.perf_counter()
    first, step, busy = 0.0, 0, False
    while pending or busy:
        if pending and step % STEPS_APART == 0:
            prompt, tokens = pending.pop(0)
            generator.insert([prompt], [tokens])
        prompts, responses = generator.next()
        now = time.perf_counter()
        first = first or now - begin if responses else first
        if responses and busy:
            (reading if prompts else plain).append((len(responses), now - last))
        last, busy, step = now, bool(prompts or responses), step + 1
        count, most = count + len(responses), max(most, len(responses))
    seconds = time.perf_counter() - begin
    generator.close()
    tell(f"{name}: speed", count / seconds, "tokens/s")
    tell(f"{name}: sequences at most", most, "")
    tell(f"{name}: first token", 1e3 * first, "ms")
    new = [*dict(reversed(plain)).items()]  # the first of each size is the last one to count
    for kind, sized in (("", plain), (" with a prompt", reading), (" at a new batch size", new)):
        gaps = 1e3 * np.array(sized)[:, 1]
        for share in (50, 90, 99, 100):
            tell(f"{name}: gap{kind}, p{share}", float(np.percentile(gaps, share)), "ms")
    stalls = [gap for _, gap in plain if gap > STALL]
    tell(f"{name}: gaps above {1e3 * STALL:.0f} ms", len(stalls), "")
    tell(f"{name}: in these", sum(stalls), "s")


def serve(shape: dict[str, int], stock: bool, names: list[str]) -> None:
    """A process that runs the trace once for each name."""
    model = build(shape, 64, 4)
    if not stock:
        start = time.perf_counter()
        print(convert_model(model).calibration or "nothing was measured", flush=True)
        tell("conversion", time.perf_counter() - start)
    for name in names:
        trace(model, name)
    if not stock:
        verify({"converted": model}, mx.random.randint(0, shape["vocab_size"], (19, 7)), 4)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can run")
    parser.add_argument("--limit", type=positive, default=170, help="seconds of a process")
    parser.add_argument("--serve", choices=("stock", "converted"), help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(dict(TINY if args.tiny else QWEN2_7B), args.serve == "stock", args.names)
        return
    table, command = Table(), [sys.executable, __file__, *["--tiny"] * args.tiny, "--serve"]
    with output(args, "server"):
        for who in ("converted", "stock"):
            with TemporaryDirectory() as folder:
                caches = empty_caches(folder)
                for names in (["fresh"], ["second", "warm"]):
                    run([*command, who, "--names", *names], caches, args.limit, table, who)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
