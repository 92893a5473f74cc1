"""Prefill and decoding of a language model: stock mlx-lm against the converted layers.

    python benchmarks/bench_generate.py
    python benchmarks/bench_generate.py --model Qwen/Qwen2-7B-Instruct-MLX --prompt-tokens 2048

Verified first: in float32 the converted model must choose the tokens that stock mlx-lm chooses.
Then the contenders take turns, each with the same random prompt.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common import Table, arguments, output, positive
from harness import in_turns
from mlx_lm.generate import generate_step

from mlx_qlayers import convert_model, explain, use_backend
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.runtime.backend import BACKENDS, BackendError, unavailable


@dataclass(frozen=True)
class Contender:
    """A model, and the backend that it is to run on."""

    name: str
    model: nn.Module
    backend: str = "auto"

    def generate(
        self, prompt: mx.array, tokens: int
    ) -> tuple[list[int], tuple[float, float, float]]:
        """Tokens, chosen greedily; seconds to the first and from there on, and the peak in MB."""
        mx.reset_peak_memory()
        with use_backend(self.backend):
            start = time.perf_counter()
            steps = generate_step(prompt, self.model, max_tokens=tokens)
            chosen = [int(next(steps)[0])]
            first = time.perf_counter()
            chosen += [int(token) for token, _ in steps]
            end = time.perf_counter()
        return chosen, (first - start, end - first, mx.get_peak_memory() / 1e6)


def contenders(model: str, dtype: str) -> list[Contender]:
    """Stock, converted as a user gets it, and converted on each backend that can run here."""
    stock, _, _, quantization = load_stock(model)
    stock.set_dtype(getattr(mx, dtype))
    converted = copy.deepcopy(stock)  # the arrays are shared
    convert_model(converted, config=quantization)
    found = [Contender("stock mlx-lm", stock), Contender("converted (auto)", converted)]
    names = [name for name in BACKENDS[1:] if unavailable(name) is None]
    return found + [Contender(f"converted ({name})", converted, name) for name in names]


def verify(found: list[Contender], prompt: mx.array, tokens: int) -> set[str]:
    """The names of the contenders that can run, after a check that all choose the same tokens.

    Raises:
        SystemExit: one of them chooses another.
    """
    wanted, _ = found[0].generate(prompt, tokens)
    able = {found[0].name}
    for contender in found[1:]:
        try:
            chosen, _ = contender.generate(prompt, tokens)
        except BackendError as error:
            print(f"{contender.name} is left out: {error}")
            continue
        if chosen != wanted:
            same = [a == b for a, b in zip(chosen, wanted, strict=True)].index(False)
            raise SystemExit(f"{contender.name} differs from stock after {same} tokens")
        able.add(contender.name)
    print(f"verified: in float32 {', '.join(sorted(able))} choose the same {tokens} tokens\n")
    return able


def measure(found: list[Contender], prompt: mx.array, args: argparse.Namespace) -> None:
    """Let the contenders generate in turn, and print a row for each."""
    by_name = {contender.name: contender for contender in found}
    runs = in_turns(by_name, args.repeats, lambda each: each.generate(prompt, args.tokens + 1)[1])
    table, counts = Table(), (args.prompt_tokens, args.tokens)
    stock = next(iter(runs.values()))
    for name, done in runs.items():
        row: dict[str, Any] = {"layers": name}
        for what, taken, base, tokens in zip(
            ("prefill", "decode"), done, stock, counts, strict=False
        ):
            row |= {f"{what} tok/s": taken.per(tokens), f"{what} x": base.median / taken.median}
        row |= {"peak MB": done[2], "model": Path(args.model).name, "dtype": args.dtype}
        table.add(**row, tokens=args.tokens)


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--model", default=None, help="the one that ships by default")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--prompt-tokens", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=64, help="tokens to decode")
    parser.add_argument("--verify-tokens", type=positive, default=32)
    args = parser.parse_args()
    args.model = args.model or shipped_model()

    with output(args, "generate"):
        exact = contenders(args.model, "float32")
        mx.random.seed(0)
        prompt = mx.random.randint(0, exact[0].model.args.vocab_size, (args.prompt_tokens,))
        able = verify(exact, prompt, args.verify_tokens)
        del exact
        explain(reset=True)
        found = [c for c in contenders(args.model, args.dtype) if c.name in able]
        measure(found, prompt, args)
        print("\npaths taken:", *explain(), sep="\n  ")


if __name__ == "__main__":
    main()
