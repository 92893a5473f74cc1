"""The cost of batch-invariant results: decoding beside the default, alone and in batches.

    python benchmarks/bench_invariance.py --model models/tales-qwen2
    python benchmarks/bench_invariance.py               # 7B, on a GPU
    python benchmarks/bench_invariance.py --layers 6 --hidden 1024

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
    if args.model:
        made: nn.Module = mlx_lm.load(args.model)[0]
    else:
        shape = QWEN2_7B | {"num_hidden_layers": args.layers}
        if args.hidden != shape["hidden_size"]:
            sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden}
            shape |= sizes | {"num_attention_heads": args.hidden // 64, "vocab_size": 16384}
        made = build(shape, 64, 4)
    convert_model(made, batch_invariant=invariant)  # which compares bits
    return made


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--model", help="a real one; else random weights")
    parser.add_argument("--layers", type=positive, default=28)
    parser.add_argument("--hidden", type=positive, default=3584)
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
