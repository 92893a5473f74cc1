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

With ``--model`` text is looked up in the prompt and behind it. A model that chats is to copy code
with one name changed, which the likeliest tokens do; another one goes on with lines that were
repeated. The other text is sampled with a seed, and repeats nothing. Verified: texts are those of
``mlx_lm.generate_step``. Then what a round of several tokens costs beside a step of one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from common import Table, arguments, output, positive
from decoding_model import QWEN2_7B, TINY, build, decode
from harness import in_turns
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_qlayers import convert_model, load
from mlx_qlayers.speculation.depth import LENGTHS, Depths
from mlx_qlayers.speculation.drawing import Drawer, Drawn
from mlx_qlayers.speculation.loop import Speculation, batch_caches, speculative_generate_step
from mlx_qlayers.speculation.rollback import Checkpoint
from mlx_qlayers.speculation.rounds import Rounds
from mlx_qlayers.speculation.sequence import Text
from mlx_qlayers.speculation.sources import Draw

LINES = "The king gave one apple to the first son. The king gave two apples to the second son. "
_STORY = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
_EDIT = "Copy this code word for word, but call the first function surface:\n```python\n{}```"
_FUNCTION = '''def {}(width, height):
    """The {} of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return {}


'''
_CODE = {
    "area": "width * height",
    "perimeter": "2 * (width + height)",
    "diagonal": "(width**2 + height**2) ** 0.5",
}


class Zeros:
    """Guesses that are no better than any."""

    def ready(self, tokens: Sequence[int]) -> bool:
        return True

    def propose(self, tokens: Sequence[int], depth: int, draw: Draw) -> mx.array:
        return mx.zeros(depth, mx.uint32)

    def propose_behind(
        self, tokens: Sequence[int], last: mx.array, right: mx.array, depth: int, draw: Draw
    ) -> mx.array:
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


# Seconds of a token of each sequence, of a step, and accepted guesses of a round and sequence.
Taken = tuple[float, float, float]


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
        ahead = run.behind(flight)
        new = run.read(flight)
        now = time.perf_counter()
        run.record(flight, new, now - tic, ahead)
        run.settle(flight, new, [len(each) for each in new])
        if steps == 0:
            start = now
        else:
            tokens += sum(map(len, new))
        steps, tic = steps + 1, now
        if ahead is not None and ahead.checkpoint is None:
            run.asked()
        flight = ahead or run.next()
    seconds = tic - start
    mx.eval(flight.found)
    accepted = run.report.accepted / max(sum(run.report.lengths), 1)
    return seconds * len(prompts) / tokens, seconds / (steps - 1), accepted


def synthetic(args: argparse.Namespace) -> None:
    model = build(TINY if args.tiny else QWEN2_7B, 64, 4)
    convert_model(model, verify=False)
    table = Table()
    for size in args.batches:
        shape, key = (size, args.prompt_tokens), mx.random.key(1)
        prompts = cast(list[list[int]], mx.random.randint(0, 90, shape, key=key).tolist())
        ways = {"plain": -1, **{f"depth {d}": d for d in args.depths}, "auto": None}

        def run(depth: int | None, prompts: list[list[int]] = prompts) -> Taken:
            if depth == -1:
                seconds = decode(model, prompts, args.tokens) / args.tokens
                return seconds, seconds, 0.0
            return rounds(model, prompts, depth, args)

        done = in_turns(ways, args.repeats, run)
        base = done["plain"][0]
        for way, (taken, step, accepted) in done.items():
            row = {"tokens/s": taken.per(size), "x": base.median / taken.median}
            row |= {"ms a step": step.scaled(1e3), "cost": step.median / base.median}
            table.add(batch=size, way=way, **row, accepted=round(accepted.median, 2))


def looked_up(args: argparse.Namespace) -> None:
    model, tokenizer = load(args.model)
    if args.dtype:
        model.set_dtype(getattr(mx, args.dtype))
    table = Table()
    for name, (tokens, temp) in _prompts(tokenizer).items():
        texts: set[tuple[int, ...]] = set()
        write = partial(_written, model, mx.array(tokens, mx.uint32), args.tokens, temp, texts)
        done = in_turns({"plain": False, "look-up": True}, args.repeats, write)
        if len(texts) > 1:
            print(f"{name}: the texts differ, as they may where numbers are rounded")
        for way, (taken, accepted) in done.items():
            row = {"tokens/s": taken.per(1), "x": done["plain"][0].median / taken.median}
            table.add(text=name, way=way, **row, accepted=round(accepted.median, 2))
    caches = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, args.prompt_tokens), mx.uint32), cache=caches))

    def step(length: int) -> float:
        start = time.perf_counter()
        before = Checkpoint(model, caches, length)
        mx.eval(model(mx.zeros((1, length), mx.uint32), cache=caches))
        if length > 1:
            before.back([length - 1])
        return time.perf_counter() - start

    times = in_turns({f"{n} tokens": n for n in (1, *LENGTHS)}, 3 * args.repeats, step)
    for way, taken in times.items():
        cost = taken.median / times["1 tokens"].median
        table.add(text="a step", way=way, cost=cost, **{"ms a step": taken.scaled(1e3)})


def _prompts(tokenizer: Any) -> dict[str, tuple[list[int], float]]:
    """Tokens of a text that repeats itself and of one that does not, and their temperatures."""
    if not tokenizer.has_chat_template:
        again, new = tokenizer.encode(LINES * 4 + "The king"), tokenizer.encode("Once upon a time")
        return {"repeating": (again, 0.0), "new": (new, 1.0)}
    code = "".join(_FUNCTION.format(name, name, result) for name, result in _CODE.items())
    ask = [{"role": "user", "content": _EDIT.format(code.rstrip() + "\n")}]
    start = [*ask, {"role": "assistant", "content": "```python\n"}]
    edit = tokenizer.apply_chat_template(start, continue_final_message=True)
    ask = [{"role": "user", "content": _STORY}]
    story = tokenizer.apply_chat_template(ask, add_generation_prompt=True)
    return {"code edit": (edit, 0.0), "new": (story, 1.0)}


def _written(
    model: nn.Module,
    prompt: mx.array,
    count: int,
    temp: float,
    texts: set[tuple[int, ...]],
    by_guesses: bool,
) -> tuple[float, float]:
    """Add a text to others: seconds of a token behind the first, accepted guesses of a round."""
    mx.random.seed(1)
    options: dict[str, Any] = {"max_tokens": count, "sampler": make_sampler(temp=temp)}
    speculation = Speculation(prompt_lookup=True)
    if by_guesses:
        steps = speculative_generate_step(prompt, model, speculation, **options)
        tokens = (token for token, *_ in steps)
    else:
        tokens = (int(token) for token, _ in generate_step(prompt, model, **options))
    text, start = [next(tokens)], time.perf_counter()
    text += tokens
    seconds = (time.perf_counter() - start) / (count - 1)
    report = speculation.report
    texts.add(tuple(text))
    return seconds, report.accepted / max(report.rounds, 1)


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
