"""Decoding with a model of Qwen2-7B's shape, and the kernels of a step.

    python benchmarks/bench_decode.py
    python benchmarks/bench_decode.py --tiny
    python benchmarks/bench_decode.py --contexts 16 4096 16384 32768
    python benchmarks/bench_decode.py --kv-bits 8 4 --prefill 16384 32768
    python benchmarks/bench_decode.py --kv-bits 8 4 --batches 32 --contexts 8192

The weights are random and need no download. Stock mlx-lm and the converted model, with and without
fused launches, share them and run in mlx-lm's own loops: ``generate_step`` for one sequence,
``BatchGenerator`` for several. Verified first, by the kernels that are then timed: the logits are
as accurate as those of dense float32 weights with every result rounded once. A prompt is read again
and again, and then prompts each of which is a token longer, as those of a user have new lengths.
With PyTorch on an NVIDIA GPU its profiler then times the kernels of a step one by one.

With ``--contexts`` only one sequence is decoded, behind so many random keys and values: as many
tokens as a cache grows by, so that what happens once in so many is part of the time.
With ``--kv-bits`` one sequence is read and decoded with quantized caches, and with one in bfloat16:
the converted model alone, as stock has no product with packed keys of most lengths on CUDA.
With both, sequences are decoded together behind so many random keys and values in caches of either
kind; ``error`` is how far logits are from those over bfloat16, by norms.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common import Table, arguments, output, positive
from decoding_model import QWEN2_7B, TINY, build, cache_of, decode, filled, prefill, verify
from harness import emptied, in_turns
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from mlx_qlayers import convert_model, explain
from mlx_qlayers.decode.quantized_caches import quantized

BATCHES = (1, 4, 8)
# Tokens that a cache of mlx-lm's grows by.
GROWTH = 256
PREFILLS = (512, 2048)
# Parts of a kernel's name that say nothing: where it is, its hash and its arguments.
_NOISE = re.compile(r"mlx::core::|cu::|custom_kernel_|_[0-9a-f]{16}(?=\()|void |\(.*|<.*")


def speeds(models: dict[str, nn.Module], args: argparse.Namespace) -> None:
    """Tokens a second of every model at every batch size and of its prompts, or behind contexts."""
    vocabulary, table = models["stock"].args.vocab_size, Table()
    ours = {name: model for name, model in models.items() if name != "stock"}

    def measure(what: str, tokens: int, steps: int, run: Callable[[nn.Module], float]) -> None:
        """A row for each model, with how many times the speed of stock it is."""
        done = in_turns(ours if args.no_stock else models, args.repeats, run)
        for name, times in done.items():
            row = {"tokens/s": times.per(tokens), "ms": times.scaled(1e3 / steps)}
            x = {} if args.no_stock else {"x": done["stock"].median / times.median}
            table.add(layers=name, what=what, **row, **x)

    for batch in () if args.contexts else args.batches:
        prompts = mx.random.randint(0, vocabulary, (batch, args.prompt_tokens + 3))
        verify(ours, prompts, 4)
        run = lambda m, p=prompts[:, :-3].tolist(): decode(m, p, args.tokens)  # noqa: B008,E731
        measure(f"decode, batch {batch}", batch * args.tokens, args.tokens, run)
    for length in () if args.contexts else args.prefill:
        tokens = mx.random.randint(0, vocabulary, (1, 2 * length))
        verify(ours, tokens[:, : length + 1], 1)
        measure(f"prefill {length}", length, 1, lambda m, t=tokens[0, :length]: prefill(m, t))
        # As requests come: each model has every length once.
        lengths = {id(m): itertools.count(length + 1) for m in models.values()}
        run = lambda m, t=tokens[0], n=lengths: prefill(m, t[: next(n[id(m)])])  # noqa: E731
        measure(f"prefill {length}, new lengths", length, 1, run)
    for length in args.contexts or ():
        verify(ours, mx.random.randint(0, vocabulary, (1, 4)), 3, length)
        run = lambda m, n=length: decode(m, [[1]], GROWTH, filled(m, n))  # noqa: E731
        measure(f"context {length}", GROWTH, GROWTH, run)


def quantized_caches(model: nn.Module, args: argparse.Namespace) -> None:
    """Times of a prompt and of a token behind it, by the bits of the cache."""
    names, table = ("prompt ms", "peak MB", "cache MB", "tokens/s"), Table()
    for length in args.prefill:
        prompt = mx.random.randint(0, model.args.vocab_size, (length,), key=mx.random.key(length))
        run = lambda bits, p=prompt: _behind_prompt(model, p, bits, args)  # noqa: E731
        kinds = {str(bits or 16): bits for bits in (None, *args.kv_bits)}
        for bits, figures in in_turns(kinds, args.repeats, run).items():
            table.add(prompt=length, bits=bits, **dict(zip(names, figures, strict=True)))


def _behind_prompt(
    model: nn.Module, prompt: mx.array, bits: int | None, args: argparse.Namespace
) -> tuple[float, ...]:
    """Milliseconds of a prompt, megabytes at most beside weights, those of its cache, tokens/s."""
    before = emptied()  # else the last turn's cache may count as there before
    cache = make_prompt_cache(model)
    mx.reset_peak_memory()
    options = {"kv_bits": bits, "kv_group_size": args.group_size, "quantized_kv_start": 0}
    start = time.perf_counter()
    steps = generate_step(prompt, model, max_tokens=args.tokens + 1, prompt_cache=cache, **options)
    next(steps)
    first, peak = time.perf_counter(), mx.get_peak_memory() - before
    for _ in steps:
        pass
    speed = args.tokens / (time.perf_counter() - first)
    return (first - start) * 1e3, peak / 1e6, sum(c.nbytes for c in cache) / 1e6, speed


def batched_caches(model: nn.Module, args: argparse.Namespace) -> None:
    """Times of a step of several sequences, and memory beside the weights, by the caches' bits."""
    table = Table()
    for batch, length in itertools.product(args.batches, args.contexts):
        right: list[mx.array] = []
        run = lambda bits: _step_of_batch(model, (batch, length), bits, args, right)  # noqa: B023,E731
        kinds = {str(bits or 16): bits for bits in (None, *args.kv_bits)}
        for bits, (ms, *others) in in_turns(kinds, args.repeats, run).items():
            row = {"ms": ms, "tokens/s": ms.per(batch * 1e3)}
            for name, found in zip(("cache MB", "peak MB", "error"), others, strict=True):
                row[name] = found.median
            table.add(batch=batch, context=length, bits=bits, **row)


def _step_of_batch(
    model: nn.Module,
    shape: tuple[int, int],
    bits: int | None,
    args: argparse.Namespace,
    right: list[mx.array],
) -> tuple[float, ...]:
    """Milliseconds of a step, megabytes of the caches and at most beside weights, the error."""
    (batch, length), before, cache = shape, emptied(), []
    for i, one in enumerate(filled(model, length)):
        each: Any = BatchKVCache([0] * batch)
        sizes = (1 + mx.arange(batch)[:, None, None, None] / 64).astype(one.keys.dtype)
        each.update_and_fetch(one.keys * sizes, one.values * sizes)
        cache.append(quantized(each, args.group_size, bits) if bits else each)
        mx.eval(cache[i].state)
    del one, each
    tokens = mx.arange(batch)[:, None]
    logits = model(tokens, cache=cache).astype(mx.float32)
    right[:] = right or [logits]
    error = (mx.linalg.norm(logits - right[0]) / mx.linalg.norm(right[0])).item()
    del logits
    for _ in range(3):  # the last one without what only the first have to do
        tokens = model(tokens, cache=cache)[:, -1:].argmax(-1)
        mx.eval(tokens)
    held = sum(c.nbytes for c in cache)
    mx.reset_peak_memory()
    start = time.perf_counter()
    for _ in range(args.tokens):  # as mlx-lm's loop, which launches one step ahead
        new = model(tokens, cache=cache)[:, -1:].argmax(-1)
        mx.async_eval(new)
        mx.eval(tokens)
        tokens = new
    mx.eval(tokens)
    taken = (time.perf_counter() - start) * 1e3 / args.tokens
    return taken, held / 1e6, (mx.get_peak_memory() - before) / 1e6, error


def kernels(model: nn.Module, args: argparse.Namespace) -> None:
    """The time of each kernel of a step on the device, by batch."""
    for batch in args.batches:
        table = Table()
        prompts = mx.random.randint(0, model.args.vocab_size, (batch, args.prompt_tokens))
        cache = cache_of(model, batch)
        y = model(prompts, cache=cache)[:, -1:].argmax(-1)
        y = model(y, cache=cache).argmax(-1)  # no cache is about to grow
        mx.eval(y, [c.state for c in cache])

        def step(y: mx.array = y, cache: list[Any] = cache) -> None:
            logits = model(y, cache=cache)
            mx.eval((logits - mx.logsumexp(logits, keepdims=True)).argmax(-1))

        found = kernel_times(step, repeats=8)
        for name, count, seconds in found:
            figures = {"us each": seconds / count * 1e6, "us a step": seconds * 1e6}
            table.add(kernel=name, batch=batch, **{"a step": count}, **figures)
        print(f"{sum(seconds for *_, seconds in found) * 1e3:.3f} ms a step\n", flush=True)


def kernel_times(step: Callable[[], object], repeats: int) -> list[tuple[str, float, float]]:
    """The kernels of a step: name, launches a step, seconds a step; the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.zeros(1, device="cuda")
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            step()
        mx.synchronize()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[_NOISE.sub("", event.name)].append(event.time_range.elapsed_us() * 1e-6)
    rows = [(name, len(times) / repeats, sum(times) / repeats) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can run")
    parser.add_argument("--fused-only", action="store_true", help="save time: fewer kernels")
    parser.add_argument("--no-stock", action="store_true", help="save time: ours alone")
    parser.add_argument("--batches", type=positive, nargs="*", default=BATCHES)
    parser.add_argument("--contexts", type=positive, nargs="*", help="decode behind so many keys")
    parser.add_argument("--kv-bits", type=positive, nargs="*", help="of quantized caches")
    parser.add_argument("--prompt-tokens", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=64, help="tokens a sequence")
    parser.add_argument("--prefill", type=positive, nargs="*", default=PREFILLS)
    args = parser.parse_args()

    args.group_size = 32 if args.tiny else 64  # as many numbers as a head has
    both = args.contexts and args.kv_bits
    modes = {"batched_caches": both, "contexts": args.contexts, "caches": args.kv_bits}
    modes |= {"batches": args.no_stock}
    with output(args, "_".join(["decode", *[mode for mode, asked in modes.items() if asked][:1]])):
        measure(args)
    print("paths taken:", *explain(), sep="\n  ")


def measure(args: argparse.Namespace) -> None:
    """Build the models and measure what was asked for."""
    start = time.perf_counter()
    stock = build(TINY if args.tiny else QWEN2_7B, args.group_size, 4)
    models = {"stock": stock}
    kinds = {"converted, not fused": False, "converted": True}
    if args.fused_only or args.contexts or args.kv_bits:
        del kinds["converted, not fused"]
    for name, fuse in kinds.items():
        models[name] = copy.deepcopy(stock)  # the arrays are shared
        report = convert_model(models[name], fuse=fuse, verify=False)  # that is done below
    print(report.summary(), end="\n\n", flush=True)
    explain(reset=True)
    if args.kv_bits and args.contexts:
        batched_caches(models["converted"], args)
    elif args.kv_bits:
        quantized_caches(models["converted"], args)
    else:
        speeds(models, args)
        has_profiler = mx.cuda.is_available() and find_spec("torch") is not None
        if not args.contexts and has_profiler:
            kernels(models["converted"], args)
    print(f"{time.perf_counter() - start:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
