"""Where the time of a token goes: build, submission and waiting; kernels.

Kernels are timed on an NVIDIA GPU by PyTorch's profiler (CUPTI).
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common import Sample, Table
from decoding_model import begun
from verified_model import filled

from mlx_qlayers.metal.quantized_matmul import qmv as quantized_matmul

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


def step_time(model: nn.Module, prompts: mx.array, n: int) -> float:
    """Seconds a step where each is queued behind the one before, as in generation."""
    y, cache = begun(model, prompts)
    start = time.perf_counter()
    for _ in range(n):
        y = model(y, cache=cache).argmax(-1)
        mx.async_eval(y)
    mx.eval(y)
    return (time.perf_counter() - start) / n


def launches(model: nn.Module, prompts: mx.array) -> int:
    """Primitives in the graph of a step that start work on the device."""
    y, cache = begun(model, prompts)
    text = io.StringIO()
    y = model(y, cache=cache)
    mx.export_to_dot(text, y, *(a for c in cache for a in (c.keys, c.values)))
    names = re.findall(r'label ="([^"]+)", shape=rectangle', text.getvalue())
    return sum(_VIEWS.match(name) is None for name in names)


def breakdown(models: dict[str, nn.Module], args: argparse.Namespace) -> None:
    """Where the time of a step goes, for each model and batch size."""
    size = max(args.batches), args.prompt_tokens
    if args.no_stock:
        models = {name: model for name, model in models.items() if name != "stock"}
    tokens = mx.random.randint(0, next(iter(models.values())).args.vocab_size, size)
    print("a step of decoding, ms: Python builds the graph, MLX submits it, the rest is waiting;")
    print("then a step overlapped as in generation")
    names = ("launches", "build", "submit", "wait", "step")
    table = Table({"layers": 20, "batch": 5, **dict.fromkeys(names, 9)})
    for batch, (name, model) in itertools.product(args.batches, models.items()):
        prompts, steps = tokens[:batch], max(8, args.tokens // batch)
        ms = {key: value * 1e3 for key, value in asdict(anatomy(model, prompts, steps)).items()}
        ms["step"] = 1e3 * min(step_time(model, prompts, steps) for _ in range(args.repeats))
        table.add(layers=name, batch=batch, launches=launches(model, prompts), **ms)
    print(flush=True)


def kernels(model: nn.Module, args: argparse.Namespace) -> None:
    """The time of each kernel of a step on the device, by batch or context."""
    what, sizes = ("context", args.contexts) if args.contexts else ("batch", args.batches)
    for size in sizes:
        table = Table({"kernel": 60, what: 7, "a step": 7, "us each": 8, "us a step": 9})
        if args.contexts:
            y, cache = mx.array([[1]]), filled(model, size)
        else:
            prompts = mx.random.randint(0, model.args.vocab_size, (size, args.prompt_tokens))
            y, cache = begun(model, prompts)

        def step(y: mx.array = y, cache: list[Any] = cache) -> None:
            logits = model(y, cache=cache)
            mx.eval((logits - mx.logsumexp(logits, keepdims=True)).argmax(-1))

        found = kernel_times(step, repeats=8)
        for name, count, seconds in found:
            figures = {"us each": seconds / count * 1e6, "us a step": seconds * 1e6}
            table.add(kernel=name, **{what: size, "a step": count}, **figures)
        busy = sum(seconds for *_, seconds in found)
        print(f"{busy * 1e3:.3f} ms a step\n", flush=True)


# Parts of a kernel's name that say nothing: where it is, its hash and its arguments.
_NOISE = re.compile(r"mlx::core::|cu::|custom_kernel_|_[0-9a-f]{16}(?=\()|void |\(.*|<.*")
_PRODUCT = re.compile(r"(?:qmv|qmv_matrix|qmv_persistent|qmm_skinny)_([0-9a-f]+)")


def can_run() -> bool:
    """Whether there are a GPU and the profiler."""
    return mx.cuda.is_available() and importlib.util.find_spec("torch") is not None


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
            found[_short(event.name)].append(event.time_range.elapsed_us() * 1e-6)
    rows = [(name, len(times) / repeats, sum(times) / repeats) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def _short(name: str) -> str:
    name = _NOISE.sub("", name)
    match = _PRODUCT.match(name)
    return name if match is None else f"products: {_parts(int(match[1], 16))}"


def _parts(omitted: int) -> str:
    """The inputs of a launch of the qmv kernels, from its kernel's name."""
    names = quantized_matmul._INPUTS + quantized_matmul._OUTPUTS
    bits = f"{omitted:0{len(names)}b}"
    given = {name for name, bit in zip(names, bits, strict=True) if bit == "0"}
    matrices, results = (
        sum(n in given for n in group) for group in (("w", "w1", "w2"), ("y", "y1", "y2"))
    )
    extras = [name for name in names if name in given and name[0] not in "wsby" and name != "x"]
    gate = ["gate"] * (matrices > results)
    return ", ".join([f"{matrices} matrices", *gate, *extras])
