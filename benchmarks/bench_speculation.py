"""Text by verified guesses: a synthetic source on Qwen2-7B's shape, or look-ups with a real model.

    python benchmarks/bench_speculation.py                        # 7B, some minutes on an H200
    python benchmarks/bench_speculation.py --tiny
    python benchmarks/bench_speculation.py --model models/tales-qwen2 --dtype float32

Weights of the first two are random, so nothing can guess their text. There the source is
synthetic: a guess counts as what the model has drawn with a probability of 0.7, whatever was drawn.
All else is as in a text: guesses go up, the step verifies them, logits become tokens, caches go
back, one read-back a round. Plain decoding is mlx-lm's own loop with the same converted model, in
turns. ``cost`` is a step's time beside a plain one's, ``accepted`` guesses a round and sequence.
``auto`` chooses the depth by measurement; where it is 0 it decodes plainly.

With ``--model`` text is looked up in the prompt and behind it. One prompt asks for its own
lines again, and shows the model how they go on: the text repeats them. The other repeats nothing
that the model goes on with. Verified first: the text is that of ``mlx_lm.generate_step``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from common import Sample, Table, arguments, output, positive
from decoding_model import QWEN2_7B, TINY, build, decode
from harness import in_turns
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers import convert_model, load
from mlx_qlayers.speculation.depth import Depths
from mlx_qlayers.speculation.drawing import Drawer, Drawn
from mlx_qlayers.speculation.loop import Speculation, batch_caches, speculative_generate_step
from mlx_qlayers.speculation.rounds import Rounds, SpeculationReport, Text
from mlx_qlayers.speculation.sources import Draw

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
        if (count := logits.shape[-2] - 1) == 0:
            return drawn
        guesses = fed[..., -count:]
        right = mx.random.uniform(shape=guesses.shape) < self.probability
        tokens = mx.where(right, guesses, drawn.tokens[..., :-1].astype(fed.dtype))
        last = drawn.tokens[..., -1:].astype(fed.dtype)
        return drawn._replace(tokens=mx.concatenate([tokens, last], axis=-1))


class Taken(NamedTuple):
    """Seconds of a token of each sequence, of a step, and what guesses were worth."""

    seconds: float
    step: float
    report: SpeculationReport


def rounds(
    model: nn.Module, prompts: list[list[int]], depth: int | None, args: argparse.Namespace
) -> Taken:
    """Write so many tokens of each text on average, behind the first step."""
    if len(prompts) > 1:
        caches = batch_caches(model, prompts)
    else:
        caches = make_prompt_cache(model)
        model(mx.array(prompts)[:, :-1], cache=caches)
        mx.eval([c.state for c in caches])
    texts = [Text(prompt, Synthetic(args.probability), [Zeros()]) for prompt in prompts]
    depths = Depths(model, 15 if depth is None else depth, measured=depth is None)
    run, flight, tic = Rounds(model, caches, texts, depths), None, time.perf_counter()
    start, steps, tokens = tic, 0, 0
    flight = run.next()
    while tokens < args.tokens * len(prompts):
        ahead = run.behind(flight) if run.goes_ahead and flight.checkpoint is None else None
        new = run.read(flight)
        now = time.perf_counter()
        run.record(flight, new, now - tic)
        run.settle(flight, new, [len(each) for each in new])
        if steps == 0:
            start = now
        else:
            tokens += sum(map(len, new))
        steps, tic = steps + 1, now
        if ahead is not None:
            run.asked()
        flight = ahead or run.next()
    seconds = tic - start
    mx.eval(flight.found)
    return Taken(seconds * len(prompts) / tokens, seconds / (steps - 1), run.report)


def synthetic(args: argparse.Namespace) -> None:
    model = build(TINY if args.tiny else QWEN2_7B, 64, 4)
    convert_model(model, verify=False)
    table = Table(
        {"batch": 5, "way": 8, "tokens/s": 16, "x": 6, "ms a step": 14, "cost": 6, "accepted": 9}
    )
    for size in args.batches:
        shape, key = (size, args.prompt_tokens), mx.random.key(1)
        prompts = cast(list[list[int]], mx.random.randint(0, 90, shape, key=key).tolist())
        ways = {"plain": -1, **{f"depth {d}": d for d in args.depths}, "auto": None}

        def run(depth: int | None, prompts: list[list[int]] = prompts) -> Taken:
            if depth == -1:
                seconds = decode(model, prompts, args.tokens) / args.tokens
                return Taken(seconds, seconds, SpeculationReport())
            return rounds(model, prompts, depth, args)

        done = in_turns(ways, args.repeats, run)
        base = Sample.of([each.seconds for each in done["plain"]])
        for way, runs in done.items():
            taken, step = (Sample.of([each[i] for each in runs]) for i in (0, 1))
            report = runs[-1].report
            accepted = round(report.accepted / max(sum(report.lengths), 1), 2)
            row = {"tokens/s": taken.per(size), "x": base.median / taken.median}
            cost = step.median / base.median
            table.add(
                batch=size, way=way, **row, cost=cost, accepted=accepted,
                **{"ms a step": step.scaled(1e3)},
            )  # fmt: skip


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
    parser.add_argument("--batches", type=positive, nargs="*", default=(1, 8))
    parser.add_argument("--depths", type=positive, nargs="*", default=(1, 2, 4, 8))
    parser.add_argument("--probability", type=float, default=0.7, help="that a guess is right")
    parser.add_argument("--prompt-tokens", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=192)
    args = parser.parse_args()
    with output(args, "speculation_text" if args.model else "speculation"):
        looked_up(args) if args.model else synthetic(args)


if __name__ == "__main__":
    main()
