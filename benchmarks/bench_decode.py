"""Decoding with a model of Qwen2-7B's shape, and where the time of a token goes.

    python benchmarks/bench_decode.py
    python benchmarks/bench_decode.py --tiny
    python benchmarks/bench_decode.py --contexts 16 4096 16384 32768
    python benchmarks/bench_decode.py --kv-bits 8 4 --prefill 16384 32768

The weights are random and need no download. Stock mlx-lm and the converted model, with and without
fused launches, share them and run in mlx-lm's own loops: ``generate_step`` for one sequence,
``BatchGenerator`` for several. Verified first, by the kernels that are then timed: the logits are
as accurate as those of dense float32 weights with every result rounded once. Stock comes last: on
CUDA, MLX compiles its products of several rows for most of a minute, here beside all else.

A token's time is then taken apart. Python builds its graph, MLX hands the graph to the device, the
device computes; in the loops the three overlap. What a part of the model costs is found by leaving
the part out, and on an NVIDIA GPU with PyTorch installed, kernel by kernel with its profiler.

With ``--kv-bits`` one sequence is read and decoded with quantized caches, and with one in bfloat16:
the converted model alone, as stock has no product with packed keys of most lengths on CUDA.

With ``--contexts`` only one sequence is decoded, behind so many random keys and values: as many
tokens as a cache grows by, so that what happens once in so many is part of the time. Kernel times
follow.
"""

from __future__ import annotations

import argparse
import copy
import io
import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from common import Sample, Table, add_output, print_facts, turns, write_output
from kernel_times import can_run, kernel_times
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from quantized_many import Case, compile_stock
from verified_model import cache_of, filled, verify

from mlx_qlayers import convert_model, explain
from mlx_qlayers.commands.arguments import positive
from mlx_qlayers.conversion import attention_patch, compiled, compiled_blocks
from mlx_qlayers.formats import Format

QWEN2_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
BATCHES = (1, 4, 8)
# Tokens that a cache of mlx-lm's grows by.
GROWTH = 256
PREFILLS = (512, 2048)
# Primitives of MLX that only describe an array anew and start nothing.
_VIEWS = re.compile(
    r"Reshape|Transpose|Broadcast|Slice$|ExpandDims|Squeeze|Flatten|Unflatten|AsStrided|Split|Depends"
)


def build(shape: dict[str, int], group_size: int, bits: int) -> nn.Module:
    """A random quantized Qwen2 in bfloat16, with a head of its own as the 7B model has."""
    args = qwen2.ModelArgs("qwen2", rms_norm_eps=1e-6, tie_word_embeddings=False, **shape)
    mx.random.seed(0)
    return quantized(qwen2.Model(args), group_size, bits)


def quantized(model: nn.Module, group_size: int, bits: int) -> nn.Module:
    """A model of random numbers in bfloat16, quantized and evaluated."""
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size, bits)
    model.eval()
    for layer in model.layers:  # one by one, so that the dense weights do not exist together
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def decode(model: nn.Module, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for ``tokens`` steps after the first, through mlx-lm's loop."""
    if len(prompts) == 1:
        steps = generate_step(mx.array(prompts[0]), model, max_tokens=tokens + 1)
        next(steps)
        start = time.perf_counter()
        for _ in steps:
            pass
    else:
        # All begin together: else prompts are read while the first sequences go on.
        size = len(prompts)
        generator = BatchGenerator(model, completion_batch_size=size, prefill_batch_size=size)
        generator.insert(prompts, [tokens + 1] * len(prompts))
        generator.next_generated()
        start = time.perf_counter()
        while generator.next_generated():
            pass
        generator.close()
    return time.perf_counter() - start


def prefill(model: nn.Module, tokens: mx.array) -> float:
    """Seconds to fill the cache with a prompt, as mlx-lm does it."""
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    model(tokens[None], cache=cache)
    mx.eval([c.state for c in cache])
    return time.perf_counter() - start


@dataclass(frozen=True)
class Anatomy:
    """Medians for one token of one sequence, in seconds: building, handing over, waiting."""

    build: float
    submit: float
    wait: float


def begun(model: nn.Module, prompts: mx.array) -> tuple[mx.array, list[Any]]:
    """The next tokens of prompts and the caches that hold them, of which none is about to grow."""
    cache = cache_of(model, len(prompts))
    y = model(prompts, cache=cache)[:, -1:].argmax(-1)
    y = model(y, cache=cache).argmax(-1)
    mx.eval(y, [c.state for c in cache])
    return y, cache


def anatomy(model: nn.Module, prompts: mx.array, repeats: int) -> Anatomy:
    """Take a step of decoding apart, with nothing overlapping."""
    y, cache = begun(model, prompts)
    times: list[tuple[float, ...]] = []
    for _ in range(repeats):
        marks = [time.perf_counter()]
        y = model(y, cache=cache).argmax(-1)
        marks.append(time.perf_counter())
        mx.async_eval(y)
        marks.append(time.perf_counter())
        mx.eval(y)
        mx.synchronize()
        marks.append(time.perf_counter())
        times.append(tuple(b - a for a, b in itertools.pairwise(marks)))
    return Anatomy(*(Sample.of(column).median for column in zip(*times, strict=True)))


def step_time(model: Callable[..., mx.array], base: nn.Module, prompts: mx.array, n: int) -> float:
    """Seconds a step where each is queued behind the one before, as in generation."""
    y, cache = begun(base, prompts)
    mx.eval(model(y, cache=cache))
    start = time.perf_counter()
    last = y
    for _ in range(n):
        # The result only orders the steps: what is left out may have another shape.
        new = model(last, cache=cache)
        last = mx.minimum(last, mx.abs(new[:, :, 0].astype(mx.float32)).astype(last.dtype))
        mx.async_eval(last)
    mx.eval(last)
    return (time.perf_counter() - start) / n


@contextmanager
def without_attention() -> Iterator[None]:
    """Let the product of attention give its queries, in stock and converted models."""
    context = compiled.context

    def left_out(q: mx.array, *args: Any, **options: Any) -> mx.array:
        return q

    with (
        mock.patch.object(qwen2, "scaled_dot_product_attention", left_out),
        mock.patch.object(attention_patch, "attention", left_out),
        mock.patch.object(
            compiled_blocks, "attention_step", lambda q, k, v, *buffers, **_: [q, *buffers[2:4]]
        ),
        # Graphs that were made with it must not be used.
        mock.patch.object(compiled, "context", lambda: (at := context()) and (*at, "without")),
    ):
        yield


def launches(model: nn.Module, prompts: mx.array) -> int:
    """Primitives in the graph of a step that start work on the device."""
    y, cache = begun(model, prompts)
    text = io.StringIO()
    y = model(y, cache=cache)
    mx.export_to_dot(text, y, *(a for c in cache for a in (c.keys, c.values)))
    names = re.findall(r'label ="([^"]+)", shape=rectangle', text.getvalue())
    return sum(_VIEWS.match(name) is None for name in names)


def speeds(models: dict[str, nn.Module], args: argparse.Namespace) -> Iterator[Table]:
    """Tokens a second of every model at every batch size, and its prefill; given as it grows."""
    vocabulary = models["stock"].args.vocab_size
    # MLX takes as many as 64 rows at a time.
    fmt, rows = Format(args.group_size, args.bits), (16, 64)
    cases = [] if args.no_stock else [Case((512, 512), n, fmt=fmt) for n in rows]
    compiled = compile_stock(cases)
    table = Table({"layers": 20, "what": 16, "tokens/s": 14, "ms": 14, "x": 7})
    table.print_header()
    ours = {name: model for name, model in models.items() if name != "stock"}
    for group in (ours, {} if args.no_stock else {"stock": models["stock"]}):
        if group is not ours:
            for future in compiled.values():
                future.result()
        for batch in args.batches:
            prompts = mx.random.randint(0, vocabulary, (batch, args.prompt_tokens + 3))
            if group is ours:
                verify(ours, prompts, 4)

            given = prompts[:, :-3].tolist()
            done = _timed(group, args, lambda m, p=given: decode(m, p, args.tokens))
            _add(table, f"decode, batch {batch}", done, batch * args.tokens, args.tokens)
            yield table
        for length in args.prefill:
            tokens = mx.random.randint(0, vocabulary, (1, length + 1))
            if group is ours:
                verify(ours, tokens, 1)
            done = _timed(group, args, lambda m, t=tokens[0, :-1]: prefill(m, t))
            _add(table, f"prefill {length}", done, length, 1)
            yield table


def contexts(models: dict[str, nn.Module], args: argparse.Namespace) -> Iterator[Table]:
    """Tokens a second of every model behind contexts of such lengths; given as it grows."""
    table = Table({"layers": 20, "what": 16, "tokens/s": 14, "ms": 14, "x": 7})
    ours = {name: model for name, model in models.items() if name != "stock"}
    table.print_header()
    for length in args.contexts:
        tokens = mx.random.randint(0, models["stock"].args.vocab_size, (1, 4))
        verify(ours, tokens, 3, length)
        cache = [(c.keys, c.values) for c in filled(models["stock"], length)]

        def run(
            model: nn.Module,
            cache: list[tuple[mx.array, mx.array]] = cache,
            length: int = length,
        ) -> float:
            new = make_prompt_cache(model)
            for each, (each.keys, each.values) in zip(new, cache, strict=True):
                each.offset = length
            tokens = mx.array([1])
            steps = generate_step(tokens, model, max_tokens=GROWTH + 1, prompt_cache=new)
            next(steps)
            start = time.perf_counter()
            for _ in steps:
                pass
            return time.perf_counter() - start

        for group in (ours, {"stock": models["stock"]}):
            repeats = args.repeats if group is ours else 1
            done = _timed(group, argparse.Namespace(repeats=repeats), run)
            _add(table, f"context {length}", done, GROWTH, GROWTH)
        yield table


def quantized_caches(model: nn.Module, args: argparse.Namespace) -> Iterator[Table]:
    """What a prompt and a token behind it take, by the bits of the cache; given as it grows."""
    names = ("prompt ms", "peak MB", "cache MB", "tokens/s")
    table = Table({"prompt": 6, "bits": 4, **dict.fromkeys(names, 14)})
    table.print_header()
    for length, bits in itertools.product(args.prefill, (None, *args.kv_bits)):
        prompt = mx.random.randint(0, model.args.vocab_size, (length,), key=mx.random.key(length))
        times: list[float] = []
        for _ in range(2):  # compiled and paged in the first time
            cache, start = make_prompt_cache(model), time.perf_counter()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            options = {"kv_bits": bits, "kv_group_size": args.group_size, "quantized_kv_start": 0}
            options["prompt_cache"] = cache
            steps = generate_step(prompt, model, max_tokens=args.tokens + 1, **options)
            next(steps)
            times = [time.perf_counter() - start]
            peak = mx.get_peak_memory() - before
            start = time.perf_counter()
            for _ in steps:
                pass
            times.append(time.perf_counter() - start)
        figures = times[0] * 1e3, peak / 1e6, sum(c.nbytes for c in cache) / 1e6
        row = dict(zip(names, (*figures, args.tokens / times[1]), strict=True))
        table.add(prompt=length, bits=bits or 16, **row)
        yield table


def _add(table: Table, what: str, done: dict[str, Sample], tokens: int, steps: int) -> None:
    """Add rows; those of stock, which come last, show how many times as long it takes."""
    for name, times in done.items():
        figures = {"tokens/s": times.per(tokens), "ms": times.scaled(1e3 / steps)}
        row = {"layers": name, "what": what, **figures}
        others = [other for other in table.rows if other["what"] == what]
        for other in others if name == "stock" else ():
            other["x"] = row["ms"].median / other["ms"].median
            print(f"{other['layers']}, {what}: {other['x']:.2f} times the speed of stock")
        table.add(**row)


def _timed(
    models: dict[str, nn.Module], args: argparse.Namespace, run: Callable[[nn.Module], float]
) -> dict[str, Sample]:
    for model in models.values():
        run(model)  # compiled and paged in, not timed
    times: dict[str, list[float]] = {name: [] for name in models}
    for name in turns(models, args.repeats):
        times[name].append(run(models[name]))
    return {name: Sample.of(values) for name, values in times.items()}


def breakdown(models: dict[str, nn.Module], args: argparse.Namespace) -> Iterator[Table]:
    """Where the time of a step goes, for each model and batch size; given as it grows."""
    size = max(args.batches), args.prompt_tokens
    if args.no_stock:
        models = {name: model for name, model in models.items() if name != "stock"}
    tokens = mx.random.randint(0, next(iter(models.values())).args.vocab_size, size)
    names = ("launches", "build", "submit", "wait", "step", "attention", "head", "rest")
    print("a step of decoding, ms: Python builds the graph, MLX submits it, the rest is waiting;")
    print("then, overlapped as in generation, a step and its parts by leaving them out")
    table = Table({"layers": 20, "batch": 5, **dict.fromkeys(names, 9)})
    table.print_header()
    for batch, (name, model) in itertools.product(args.batches, models.items()):
        prompts, steps = tokens[:batch], max(8, args.tokens // batch)
        parts = anatomy(model, prompts, steps)

        def least(
            run: Callable[..., mx.array],
            model: nn.Module = model,
            prompts: mx.array = prompts,
            steps: int = steps,
        ) -> float:
            return min(step_time(run, model, prompts, steps) for _ in range(args.repeats))

        step, headless = least(model), least(lambda y, cache, m=model: m.model(y, cache))
        with without_attention():
            blind = least(model)
        seconds = {
            "build": parts.build,
            "submit": parts.submit,
            "wait": parts.wait,
            "step": step,
            "attention": step - blind,
            "head": step - headless,
            "rest": blind + headless - step,
        }
        ms = {key: value * 1e3 for key, value in seconds.items()}
        table.add(layers=name, batch=batch, launches=launches(model, prompts), **ms)
        yield table
    print(flush=True)


def kernels(model: nn.Module, args: argparse.Namespace) -> Iterator[Table]:
    """What each kernel of a step takes on the device, by batch or context; given as it grows."""
    what, sizes = ("context", args.contexts) if args.contexts else ("batch", args.batches)
    table = Table({"kernel": 60, what: 7, "a step": 7, "us each": 8, "us a step": 9})
    for size in sizes:
        if args.contexts:
            y, cache = mx.array([[1]]), filled(model, size)
        else:
            prompts = mx.random.randint(0, model.args.vocab_size, (size, args.prompt_tokens))
            y, cache = begun(model, prompts)

        def step(y: mx.array = y, cache: list[Any] = cache) -> None:
            logits = model(y, cache=cache)
            mx.eval((logits - mx.logsumexp(logits, keepdims=True)).argmax(-1))

        found = kernel_times(step, repeats=8)
        table.print_header()
        for name, count, seconds in found:
            figures = {"us each": seconds / count * 1e6, "us a step": seconds * 1e6}
            table.add(kernel=name, **{what: size, "a step": count}, **figures)
        busy = sum(seconds for *_, seconds in found)
        print(f"{busy * 1e3:.3f} ms a step\n", flush=True)
        yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can run")
    parser.add_argument("--fused-only", action="store_true", help="save time: fewer kernels")
    parser.add_argument("--no-stock", action="store_true", help="save time: ours alone")
    parser.add_argument("--speeds-only", action="store_true", help="without where the time goes")
    parser.add_argument("--batches", type=positive, nargs="*", default=BATCHES)
    parser.add_argument("--contexts", type=positive, nargs="*", help="decode behind so many keys")
    parser.add_argument("--kv-bits", type=positive, nargs="*", help="of quantized caches")
    parser.add_argument("--group-size", type=positive, default=64)
    parser.add_argument("--bits", type=positive, default=4)
    parser.add_argument("--prompt-tokens", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=64, help="tokens a sequence")
    parser.add_argument("--prefill", type=positive, nargs="*", default=PREFILLS)
    parser.add_argument("--repeats", type=positive, default=3)
    add_output(parser)
    args = parser.parse_args()

    print_facts()
    start = time.perf_counter()
    config = TINY if args.tiny else QWEN2_7B
    stock = build(config, args.group_size, args.bits)
    models = {"stock": stock}
    kinds = {"converted, not fused": False, "converted": True}
    if args.fused_only or args.contexts or args.kv_bits:
        del kinds["converted, not fused"]
    for name, fuse in kinds.items():
        models[name] = copy.deepcopy(stock)  # the arrays are shared
        print(f"{time.perf_counter() - start:.0f} s: {list(models)[-2]} is ready", flush=True)
        report = convert_model(models[name], fuse=fuse, verify=False)  # that is done below
    print(report.summary(), end="\n\n", flush=True)
    explain(reset=True)
    shape = (
        "/".join(map(str, config.values())) + f", {args.bits} bits in groups of {args.group_size}"
    )
    if args.kv_bits:
        parts = [quantized_caches(models["converted"], args)]
    else:
        parts = [contexts(models, args) if args.contexts else speeds(models, args)]
    if not (args.speeds_only or args.contexts or args.kv_bits):
        parts.append(breakdown(models, args))
        if can_run():
            parts.append(kernels(models["converted"], args))
    tables: list[Table] = []
    for part in parts:
        done = tables
        for table in part:
            for row in table.rows:
                row[", ".join(config)] = shape
            tables = [*done, table]
            write_output(args, "decode", tables)
        print(f"{time.perf_counter() - start:.0f} s so far\n", flush=True)
    print("paths taken:", *explain(), sep="\n  ")


if __name__ == "__main__":
    main()
