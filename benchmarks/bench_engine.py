"""Steps of decoding as they are today beside those of decode/engine.py, in turns in one process.

    python benchmarks/bench_engine.py
    python benchmarks/bench_engine.py --tiny --batches 1 2

Both engines decode the same model of Qwen2-7B's shape with random weights, behind a short and a
long prompt. The first ten tokens, in which graphs are made, are timed apart. Verified first, in
float32 on two layers: the logits of both are those of the model's own code.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from common import Table, add_output, print_facts, write_output
from decoding_model import QWEN2_7B, TINY, build
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers import convert_model
from mlx_qlayers.commands.arguments import positive
from mlx_qlayers.decode import engine

PROMPTS, FIRST = (16, 2048), 10
Step = Callable[[mx.array, list[Any]], mx.array]


def engines(model: Any) -> dict[str, Step]:
    """A step of a converted model by each engine."""

    def by_graph(tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = engine.step(model, tokens, cache)
        if logits is None:
            raise SystemExit(f"left to the model: {engine.stopped(model)}")
        return logits

    return {"today": lambda tokens, cache: model(tokens, cache=cache), "decode": by_graph}


def begun(model: Any, batch: int, prompt: int) -> tuple[mx.array, list[Any]]:
    """The token behind a random prompt, and the caches."""
    cache = make_prompt_cache(model)
    mx.random.seed(0)
    tokens = mx.random.randint(0, model.args.vocab_size, (batch, prompt))
    y = model(tokens, cache=cache)[:, -1:].argmax(-1)
    mx.eval(y, [c.state for c in cache])
    return y, cache


def verify(shape: dict[str, int], batch: int) -> None:
    """Raise ``SystemExit`` where an engine's logits are not those of the stock model."""
    stock = build(shape | {"num_hidden_layers": 2}, 64, 4)
    stock.set_dtype(mx.float32)
    model = build(shape | {"num_hidden_layers": 2}, 64, 4)
    model.set_dtype(mx.float32)
    convert_model(model, verify=False, calibrate=False)
    steps = {"stock": lambda tokens, cache: stock(tokens, cache=cache), **engines(model)}
    logits = {}
    for name, step in steps.items():
        _, cache = begun(stock if name == "stock" else model, batch, 7)
        rows = [step(mx.full((batch, 1), 3 + i, mx.int32), cache) for i in range(4)]
        logits[name] = mx.concatenate(rows, axis=1)
    for name in ("today", "decode"):
        error = mx.abs(logits[name] - logits["stock"]).max() / mx.abs(logits["stock"]).max()
        print(f"verified, batch {batch}: {name} differs by {error.item():.1e} of the largest logit")
        if not error.item() < 1e-4:
            raise SystemExit(f"{name} is wrong")


def decode(step: Step, model: Any, batch: int, prompt: int, count: int) -> tuple[float, float]:
    """Seconds of the first tokens, and tokens a second of the rest."""
    y, cache = begun(model, batch, prompt)
    first, start = 0.0, time.perf_counter()
    for i in range(count + FIRST):
        y = step(y, cache).argmax(-1)
        mx.async_eval(y)
        if i == FIRST - 1:
            mx.eval(y)
            first, start = time.perf_counter() - start, time.perf_counter()
    mx.eval(y)
    return first, batch * count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can run")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=positive, default=200)
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    shape = dict(TINY if args.tiny else QWEN2_7B)
    for batch in args.batches:
        verify(shape, batch)
    model: Any = build(shape, 64, 4)
    convert_model(model, verify=False)
    table = Table({"batch": 6, "prompt": 7, "engine": 8, "first s": 9, "tokens/s": 10})
    table.print_header()
    for batch in args.batches:
        for prompt in PROMPTS:
            for turn in range(2):  # the second has what the first one compiled
                for name, step in engines(model).items():
                    first, rate = decode(step, model, batch, prompt, args.tokens)
                    row = {"batch": batch, "prompt": prompt, "engine": f"{name} {turn + 1}"}
                    table.add(**row, **{"first s": first, "tokens/s": rate})
    print("left to the model:", engine.stopped(model) or "nothing")
    write_output(args, "engine", [table])


if __name__ == "__main__":
    main()
