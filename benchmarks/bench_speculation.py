"""Text by verified guesses: a synthetic source on Qwen2-7B's shape, or look-ups with a real model.

    python benchmarks/bench_speculation.py                        # 7B, an H200 takes 3 minutes
    python benchmarks/bench_speculation.py --tiny
    python benchmarks/bench_speculation.py --model models/tales-qwen2 --dtype float32

Weights of the first two are random, so nothing can guess their text. There the source is
synthetic: a guess counts as what the model has drawn with a probability of 0.7, whatever was drawn.
All else is as in a text: guesses go up, the step verifies them, logits become tokens, caches go
back, one read-back a round. Plain decoding is ``mlx_lm.generate_step`` with the same converted
model, in turns. ``auto`` chooses the depth by measurement; where it is 0 it decodes plainly.

With ``--model`` text is looked up in the prompt and behind it. One prompt asks for its own
lines again, and shows the model how they go on: the text repeats them. The other repeats nothing
that the model goes on with. Verified first: the text is that of ``mlx_lm.generate_step``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from common import Sample, Table, arguments, output, positive
from decoding_model import QWEN2_7B, TINY, build
from harness import in_turns
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers import convert_model, load
from mlx_qlayers.speculation.depth import Depths
from mlx_qlayers.speculation.drawing import Drawer, Drawn
from mlx_qlayers.speculation.loop import (
    Rounds,
    Speculation,
    SpeculationReport,
    speculative_generate_step,
    texts,
)
from mlx_qlayers.speculation.sources import Draw

QUANTIZE = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 0}
LINES = (
    "The red fox ran over the hill and met a grey goose near the mill. 'Good day,' said the fox, "
    "'where are you going with that basket of plums and a jug of cream?' "
)
_TALES = (
    "Long ago, by the edge of a dark forest, seven brothers built a boat of oak and willow. None "
    "of them could swim, but each wished to see what lay beyond the cold northern water."
)


class Zeros:
    """Guesses that are no better than any."""

    def ready(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        return mx.zeros(depth, mx.uint32)

    def finish(self, tokens: Sequence[int]) -> None:
        pass


class Synthetic(Drawer):
    """Draws the likeliest tokens, then takes guesses in their place with some probability."""

    def __init__(self, probability: float) -> None:
        super().__init__(None, None)
        self.probability = probability

    def __call__(self, logits: mx.array, before: mx.array | None, fed: mx.array) -> Drawn:
        drawn = super().__call__(logits, before, fed)
        if (count := len(logits) - 1) == 0:
            return drawn
        right = mx.random.uniform(shape=(count,)) < self.probability
        tokens = mx.where(right, fed[-count:], drawn.tokens[:-1].astype(fed.dtype))
        last = drawn.tokens[-1:].astype(fed.dtype)
        return drawn._replace(tokens=mx.concatenate([tokens, last]))


def plain(model: nn.Module, prompt: mx.array, tokens: int) -> float:
    """Seconds of a token, as mlx-lm decodes."""
    steps = generate_step(prompt, model, max_tokens=tokens + 1)
    next(steps)
    start = time.perf_counter()
    for _ in steps:
        pass
    return (time.perf_counter() - start) / tokens


def rounds(
    model: nn.Module, prompt: mx.array, tokens: int, depth: int | None, probability: float
) -> tuple[float, SpeculationReport]:
    """Seconds of a token behind the first step, and what guesses were worth."""
    caches = make_prompt_cache(model)
    model(prompt[None, :-1], cache=caches)
    mx.eval([c.state for c in caches])
    depths = Depths(model, 15 if depth is None else depth, measured=depth is None)
    ids = [int(token) for token in prompt.tolist()]  # type: ignore[union-attr]
    run = Rounds(model, caches, [Zeros()], ids, Synthetic(probability), depths, QUANTIZE)
    steps = texts(run, tokens, False)
    next(steps)
    start, first = time.perf_counter(), run.report.tokens
    for _ in steps:
        pass
    return (time.perf_counter() - start) / (run.report.tokens - first), run.report


def synthetic(args: argparse.Namespace) -> None:
    model = build(TINY if args.tiny else QWEN2_7B, 64, 4)
    convert_model(model, verify=False)
    prompt = mx.random.randint(0, 90, (args.prompt_tokens,), key=mx.random.key(1))
    prompt = prompt.astype(mx.uint32)
    ways = {"plain": -1, **{f"depth {d}": d for d in args.depths}, "auto": None}

    def run(depth: int | None) -> tuple[float, SpeculationReport | None]:
        if depth == -1:
            return plain(model, prompt, args.tokens), None
        return rounds(model, prompt, args.tokens, depth, args.probability)

    done = in_turns(ways, args.repeats, run)
    table = Table({"way": 10, "tokens/s": 16, "x": 6, "ms a step": 14, "cost": 6, "accepted": 9})
    base = Sample.of([seconds for seconds, _ in done["plain"]])
    for way, results in done.items():
        taken = Sample.of([seconds for seconds, _ in results])
        report = results[-1][1]
        steps = base.scaled(1e3)
        if report is not None:
            a_step = [s * r.tokens / r.steps for s, r in results if r is not None]
            steps = Sample.of(a_step).scaled(1e3)
        accepted = report.accepted / max(report.rounds, 1) if report else 0.0
        row = {"tokens/s": taken.per(1), "x": base.median / taken.median, "ms a step": steps}
        table.add(
            way=way, **row, cost=steps.median / (1e3 * base.median), accepted=round(accepted, 2)
        )


def looked_up(args: argparse.Namespace) -> None:
    model, tokenizer = load(args.model)
    if args.dtype:
        model.set_dtype(getattr(mx, args.dtype))
    table = Table({"prompt": 10, "way": 10, "tokens/s": 16, "x": 6, "accepted": 9})
    for name, text in {"repeating": LINES * 3 + LINES[:60], "new": _TALES}.items():
        prompt = mx.array(tokenizer.encode(text), mx.uint32)

        def run(by_guesses: bool, prompt: mx.array = prompt) -> Looked:
            return _written(model, prompt, args.tokens, by_guesses)

        done = in_turns({"plain": False, "look-up": True}, args.repeats, run)
        if len({tuple(each.tokens) for runs in done.values() for each in runs}) > 1:
            print(f"{name}: the texts differ, as they may where numbers are rounded")
        base = Sample.of([each.seconds for each in done["plain"]])
        for way, runs in done.items():
            taken, report = Sample.of([each.seconds for each in runs]), runs[-1].report
            accepted = round(report.accepted / max(report.rounds, 1), 2)
            row = {"tokens/s": taken.per(1), "x": base.median / taken.median}
            table.add(prompt=name, way=way, **row, accepted=accepted)


class Looked(NamedTuple):
    """A text, seconds of each of its tokens behind the first, and what guesses were worth."""

    tokens: list[int]
    seconds: float
    report: SpeculationReport


def _written(model: nn.Module, prompt: mx.array, count: int, by_guesses: bool) -> Looked:
    speculation = Speculation(prompt_lookup=True)
    if by_guesses:
        steps = speculative_generate_step(prompt, model, speculation, max_tokens=count)
        tokens = (token for token, *_ in steps)
    else:
        tokens = (int(token) for token, _ in generate_step(prompt, model, max_tokens=count))
    text, start = [next(tokens)], time.perf_counter()
    text += tokens
    seconds = (time.perf_counter() - start) / (count - 1)
    return Looked(text, seconds, speculation.report)


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can run")
    parser.add_argument("--model", help="a real one, whose text is looked up")
    parser.add_argument("--dtype", help="of the real one")
    parser.add_argument("--depths", type=positive, nargs="*", default=(1, 2, 4, 8))
    parser.add_argument("--probability", type=float, default=0.7, help="that a guess is right")
    parser.add_argument("--prompt-tokens", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=192)
    args = parser.parse_args()
    with output(args, "speculation_text" if args.model else "speculation"):
        looked_up(args) if args.model else synthetic(args)


if __name__ == "__main__":
    main()
