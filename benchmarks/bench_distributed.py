"""A model of Llama 70B's shape on one device and sharded among ranks: stock and converted.

    mlx.launch -n 2 python benchmarks/bench_distributed.py
    mlx.launch -n 4 python benchmarks/bench_distributed.py --csv
    mlx.launch -n 2 python benchmarks/bench_distributed.py --tiny

MLX starts the ranks: over NCCL on NVIDIA GPUs, one each, else over its ring on this machine.
Weights are random and made on each rank. Rank 0 also measures the whole model, while the others
wait. Verified first: the logits of the sharded model differ no more from those of the whole one
than those differ between stock and converted layers, which round elsewhere.

Sums over the ranks are timed too, in a chain as in a model, for the plan in docs/distributed.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from common import Sample, Table, arguments, output, positive
from decoding_model import TINY, decode, prefill, quantized
from harness import seconds
from mlx_lm.models import llama

from mlx_qlayers import convert_model
from mlx_qlayers.conversion.plan import copied
from mlx_qlayers.conversion.sharding import shard_model

LLAMA_70B = {
    "hidden_size": 8192,
    "num_hidden_layers": 20,  # of 80
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
BATCHES = (1, 16)
# Sums in a chain, and rows of the numbers that are added up.
_CHAIN, _ROWS = 64, (1, 16, 512, 2048)
# Tokens of which the logits are verified.
_VERIFIED = 8


def build(shape: dict[str, int]) -> nn.Module:
    """A random Llama in bfloat16, quantized to 4 bits, with a head of its own."""
    args = llama.ModelArgs("llama", rms_norm_eps=1e-5, tie_word_embeddings=False, **shape)
    mx.random.seed(0)
    return quantized(llama.Model(args), 64, 4)


def converted(model: nn.Module) -> nn.Module:
    """A converted copy; the arrays are shared."""
    model = copied(model)
    convert_model(model, calibrate=False)
    return model


def verify(models: dict[tuple[str, int], nn.Module], rank: int, ranks: int) -> None:
    """Hold the logits of the sharded model against those of the whole one.

    Raises:
        SystemExit: they differ more than rounding explains.
    """
    tokens = mx.arange(_VERIFIED)[None] * 7 % 61
    found = models["converted", ranks](tokens)
    mx.eval(found)
    if rank == 0:
        whole, stock = (models[name, 1](tokens) for name in ("converted", "stock"))
        error, allowed = (float(mx.abs(whole - other).mean()) for other in (found, stock))
        print(f"verified: mean error {error:.2e}, by rounding elsewhere {allowed:.2e}", flush=True)
        if not error <= 2 * allowed:
            raise SystemExit("the sharded model is not accurate")


def sums(group: mx.distributed.Group, width: int, table: Table) -> None:
    """Time sums over the ranks, each of what the one before gave."""
    for rows in _ROWS:
        x = mx.zeros((rows, width), mx.bfloat16)

        def chain(x: mx.array = x) -> mx.array:
            for _ in range(_CHAIN):
                x = mx.distributed.all_sum(x * 0.5, group=group)
            return x

        times = _repeated(group, lambda run=chain: seconds(run), 5)
        ms = times.scaled(1e3 / _CHAIN)
        table.add(what=f"sum of {rows} x {width}", ranks=group.size(), ms=ms)


def _repeated(group: mx.distributed.Group, run: Callable[[], float], repeats: int) -> Sample:
    """Times after one that is not counted; all ranks begin together."""
    times = []
    for _ in range(repeats + 1):
        mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
        times.append(run())
    return Sample.of(times[1:])


def measure(args: argparse.Namespace, group: mx.distributed.Group) -> None:
    """Run on one rank; rank 0 prints and writes."""
    rank, ranks, start = group.rank(), group.size(), time.perf_counter()
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        args.csv = None
    shape = TINY if args.tiny else LLAMA_70B
    whole = build(shape)
    share = copied(whole)
    shard_model(share, group)
    mx.eval(share.parameters())
    models: dict[tuple[str, int], nn.Module] = {("stock", 1): whole, ("stock", ranks): share}
    if rank:
        del models["stock", 1], whole
    for (_, count), model in list(models.items()):
        models["converted", count] = converted(model)
        print(f"{time.perf_counter() - start:.0f} s: {count} ranks are ready", flush=True)
    verify(models, rank, ranks)
    mx.random.seed(1)
    works: list[tuple[str, int, Callable[[nn.Module], float]]] = []
    for batch in args.batches:
        prompts = mx.random.randint(0, shape["vocab_size"], (batch, 64)).tolist()
        run = lambda m, p=prompts: decode(m, p, args.tokens)  # noqa: E731
        works.append((f"decode, batch {batch}", batch * args.tokens, run))
    if args.prompt_tokens:
        tokens = mx.random.randint(0, shape["vocab_size"], (args.prompt_tokens,))
        works.insert(1, (f"prompt of {len(tokens)}", len(tokens), lambda m: prefill(m, tokens)))
    table = Table()
    with output(args, "distributed"):
        sums(group, shape["hidden_size"], table)
        for name in args.layers:
            for what, count, run in works:
                one = 0.0
                for size in (1, ranks):
                    model = models.get((name, size))  # the whole one on rank 0 alone
                    times = _repeated(
                        group, lambda m=model, r=run: 0.0 if m is None else r(m), args.repeats
                    )
                    if rank == 0:
                        one = one or times.median
                        figures = {"tokens/s": times.per(count), "ms": times.scaled(1e3)}
                        x = one / times.median
                        table.add(what=what, layers=name, ranks=size, **figures, x=x)
    print(f"\npeak memory {mx.get_peak_memory() / 1e9:.1f} GB, {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can run")
    parser.add_argument("--batches", type=positive, nargs="*", default=BATCHES)
    parser.add_argument("--layers", nargs="*", default=("converted", "stock"))
    parser.add_argument("--prompt-tokens", type=int, default=2048, help="0 leaves it out")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens a sequence")
    args = parser.parse_args()
    group = mx.distributed.init()
    if group.size() == 1:
        raise SystemExit("mlx.launch -n 2 python benchmarks/bench_distributed.py starts its ranks")
    measure(args, group)


if __name__ == "__main__":
    main()
