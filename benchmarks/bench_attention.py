"""Attention beside stock MLX: short calls, one token over long caches, and many queries.

Run ``python benchmarks/bench_attention.py`` for all of it, or with ``--short``, ``--decode`` or
``--tiles`` for a part; ``attention_decoding.py`` and ``bench_attention_tiles.py`` describe the last
two. The short calls have plain and packed keys in every dtype, beside mlx-lm's own, with the peak
above the inputs. Every result is first compared with float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import bench_attention_tiles as tiles
import mlx.core as mx
from attention_decoding import decoding_table
from common import Table, add_output, measure, peak, print_facts, write_output
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_qlayers.ops.attention import attention
from mlx_qlayers.runtime.backend import BackendError

GROUP_SIZE, BITS = 32, 8
# Heads, key heads, width of a head.
HEADS = {"small": (4, 4, 32), "grouped": (12, 2, 64), "wide": (12, 2, 128)}
# Queries and keys: decoding, speculative decoding, prompts.
LENGTHS = [(1, 64), (1, 512), (1, 2048), (8, 512), (64, 64), (256, 256)]
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
COLUMNS = {"heads": 10, "L": 4, "S": 5, "dtype": 9, "keys": 7, "stock ms": 13, "ms": 13, "times": 6}
PARTS = ("short", "decode", "tiles")

Run = Callable[[], mx.array]


def cases(
    shape: tuple[int, int, int], queries: int, keys: int, dtype: mx.Dtype
) -> Iterator[tuple[str, Run, Run, mx.array]]:
    """Pairs of stock and ours on the same random inputs, plain and packed, and the truth."""
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
    yield "plain", stock, partial(attention, q, k, v, **options), truth
    yield f"{BITS} bits", stock_packed, partial(attention, q, *packed, **options), truth


def short_calls(names: list[str], repeats: int) -> Table:
    """Measure and print short calls."""
    table = Table(COLUMNS | dict.fromkeys(("stock MB", "MB"), 8))
    table.print_header()
    for name in names:
        for queries, keys in LENGTHS:
            for dtype_name, dtype in DTYPES.items():
                for kind, theirs, ours, truth in cases(HEADS[name], queries, keys, dtype):
                    error = mx.abs(ours().astype(mx.float32) - truth).max().item()
                    if error >= 0.05:
                        raise SystemExit(f"results differ by {error}")
                    times = measure({"stock": theirs, "ours": ours}, repeats=repeats)
                    table.add(
                        heads="{}/{} {}".format(*HEADS[name]),
                        L=queries,
                        S=keys,
                        dtype=dtype_name,
                        keys=kind,
                        times=times["stock"].median / times["ours"].median,
                        ms=times["ours"].scaled(1e3),
                        MB=peak(ours),
                        **{"stock ms": times["stock"].scaled(1e3), "stock MB": peak(theirs)},
                    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part alone")
    parser.add_argument("--heads", choices=[*HEADS, "all"], default="grouped", help="of short ones")
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser)
    args = parser.parse_args()
    parts = [part for part in PARTS if getattr(args, part)] or list(PARTS)
    if len(parts) > 1 and args.csv and not args.csv.is_dir():
        parser.error("several parts need a folder for --csv")
    print_facts()
    mx.random.seed(0)
    if "short" in parts:
        names = list(HEADS) if args.heads == "all" else [args.heads]
        write_output(args, "attention_short", [short_calls(names, args.repeats)])
    if "decode" in parts:
        for table in decoding_table(args.repeats):
            write_output(args, "attention_decode", [table])
    if "tiles" in parts:
        tiles.run(args)


if __name__ == "__main__":
    if tiles.DEVICE == "ops":
        raise BackendError("no backend runs kernels on this machine")
    main()
