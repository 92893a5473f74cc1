"""Attention beside mlx-lm's own, in every dtype, with and without packed keys and values.

Run ``python benchmarks/bench_attention.py``. Every line is checked first, against float32.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import mlx.core as mx
from attention_decoding import decoding_table
from common import add_output, print_facts, write_output
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_qlayers.ops.attention import attention
from mlx_qlayers.runtime.backend import backend

GROUP_SIZE, BITS = 32, 8
# Heads, key heads, width of a head.
HEADS = {"small": (4, 4, 32), "grouped": (12, 2, 64), "wide": (12, 2, 128)}
# Queries and keys: decoding, speculative decoding, prompts.
LENGTHS = [(1, 64), (1, 512), (1, 2048), (8, 512), (64, 64), (256, 256)]


def measure(run: Callable[[], mx.array], repeats: int) -> tuple[float, float]:
    """Median and spread in milliseconds."""
    mx.eval(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        mx.eval(run())
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), max(times) - min(times)


def cases(shape: tuple[int, int, int], queries: int, keys: int, dtype: mx.Dtype):
    """Pairs of stock and ours on the same random inputs, dense and packed."""
    heads, kv_heads, width = shape
    q = mx.random.normal((1, heads, queries, width)).astype(dtype)
    k, v = (mx.random.normal((1, kv_heads, keys, width)).astype(dtype) for _ in range(2))
    packed = [mx.quantize(a, group_size=GROUP_SIZE, bits=BITS) for a in (k, v)]
    mx.eval(q, k, v, packed)
    options = {"scale": width**-0.5, "mask": "causal" if queries > 1 else None}
    stock = partial(mx.fast.scaled_dot_product_attention, q, k, v, **options)
    # mlx-lm scales its queries in place.
    stock_packed = lambda: quantized_scaled_dot_product_attention(  # noqa: E731
        mx.array(q), *packed, **options, group_size=GROUP_SIZE, bits=BITS
    )
    wide = [a.astype(mx.float32) for a in (q, k, v)]
    truth = mx.fast.scaled_dot_product_attention(*wide, **options)
    yield "dense", stock, partial(attention, q, k, v, **options), truth
    yield f"{BITS} bits", stock_packed, partial(attention, q, *packed, **options), truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", choices=[*HEADS, "all"], default="grouped")
    parser.add_argument("--decode", action="store_true", help="one token over long caches")
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser)
    args = parser.parse_args()
    if args.decode:
        print_facts()
        for table in decoding_table(args.repeats):
            write_output(args, "attention_decode", [table])
        return
    print(
        f"{mx.default_device()}, {platform.processor() or platform.machine()}, "
        f"mlx {version('mlx')}, backend {backend()}"
    )
    columns = f"{'H/Hkv D':12}{'L':>5}{'S':>6} {'dtype':10}{'keys':8}"
    print(f"{columns}{'stock ms':>18}{'ms':>18}{'ratio':>9}")
    mx.random.seed(0)
    for name in HEADS if args.heads == "all" else [args.heads]:
        heads, kv_heads, width = HEADS[name]
        for queries, keys in LENGTHS:
            for dtype in (mx.float32, mx.bfloat16, mx.float16):
                for kind, theirs, ours, truth in cases(HEADS[name], queries, keys, dtype):
                    error = mx.abs(ours().astype(mx.float32) - truth).max().item()
                    assert error < 0.05, f"results differ by {error}"
                    (stock, wide), (plugin, narrow) = (
                        measure(run, args.repeats) for run in (theirs, ours)
                    )
                    print(
                        f"{f'{heads}/{kv_heads} {width}':12}{queries:5}{keys:6} "
                        f"{str(dtype).split('.')[-1]:10}{kind:8}{stock:10.3f} +-{wide / 2:5.3f}"
                        f"{plugin:10.3f} +-{narrow / 2:5.3f}{stock / plugin:8.2f}x"
                    )


if __name__ == "__main__":
    main()
