"""Where the time of a token goes: build, submission and waiting, parts of the model, kernels."""

from __future__ import annotations

import argparse
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
from common import Sample, Table
from decoding_model import begun
from kernel_times import kernel_times
from mlx_lm.models import qwen2
from verified_model import filled

from mlx_qlayers.conversion import attention_patch, cache_slots, compiled

# Primitives of MLX that only describe an array anew and start nothing.
_VIEWS = re.compile(
    r"Reshape|Transpose|Broadcast|Slice$|ExpandDims|Squeeze|Flatten|Unflatten|AsStrided|Split|Depends"
)


@dataclass(frozen=True)
class Anatomy:
    """Medians for one token of one sequence, in seconds: building, handing over, waiting."""

    build: float
    submit: float
    wait: float


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
            cache_slots, "attention_step", lambda q, k, v, *buffers, **_: [q, *buffers[2:4]]
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

        step = least(model)
        with mock.patch.object(model, "lm_head", nn.Identity()):
            headless = least(model)
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
