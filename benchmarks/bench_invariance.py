"""The cost of batch-invariant results: decoding beside the default, alone and in batches.

    python benchmarks/bench_invariance.py --model models/tales-qwen2
    python benchmarks/bench_invariance.py               # 7B, on a GPU

Verified first: converted so, a sequence gets the same logits alone and in each batch.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from common import Table, arguments, output, positive
from decoding_model import QWEN2_7B, build, decode
from harness import in_turns

from mlx_qlayers import convert_model


def model(args: argparse.Namespace, invariant: bool) -> nn.Module:
    made: nn.Module = mlx_lm.load(args.model)[0] if args.model else build(QWEN2_7B, 64, 4)
    convert_model(made, batch_invariant=invariant)  # which compares bits
    return made


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--model", help="a real one; else random weights")
    parser.add_argument("--batches", type=positive, nargs="*", default=(1, 16))
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--tokens", type=positive, default=48)
    args = parser.parse_args()
    with output(args, "invariance"):
        models = {"default": model(args, False), "invariant": model(args, True)}
        table = Table()
        for size in args.batches:
            key, shape = mx.random.key(size), (size, args.prompt_tokens)
            prompts: list[list[int]] = mx.random.randint(5, 90, shape, key=key).tolist()  # type: ignore[assignment]

            def run(each: nn.Module, prompts: list[list[int]] = prompts) -> float:
                return decode(each, prompts, args.tokens) / args.tokens

            done = in_turns(models, args.repeats, run)
            for way, taken in done.items():
                row = {"ms a step": taken.scaled(1e3), "tokens/s": taken.per(size)}
                table.add(batch=size, way=way, **row, x=taken.median / done["default"].median)


if __name__ == "__main__":
    main()
