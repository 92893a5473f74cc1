"""The time of each kernel of a step on an NVIDIA GPU, by PyTorch's profiler (CUPTI)."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common import Table
from decoding_model import begun


def kernels(model: nn.Module, args: argparse.Namespace) -> None:
    """The time of each kernel of a step on the device, by batch."""
    for batch in args.batches:
        table = Table()
        prompts = mx.random.randint(0, model.args.vocab_size, (batch, args.prompt_tokens))
        start = begun(model, prompts)

        def step(start: tuple[mx.array, list[Any]] = start) -> None:
            y, cache = start
            logits = model(y, cache=cache)
            mx.eval((logits - mx.logsumexp(logits, keepdims=True)).argmax(-1))

        found = kernel_times(step, repeats=8)
        for name, count, seconds in found:
            figures = {"us each": seconds / count * 1e6, "us a step": seconds * 1e6}
            table.add(kernel=name, batch=batch, **{"a step": count}, **figures)
        busy = sum(seconds for *_, seconds in found)
        print(f"{busy * 1e3:.3f} ms a step\n", flush=True)


# Parts of a kernel's name that say nothing: where it is, its hash and its arguments.
_NOISE = re.compile(r"mlx::core::|cu::|custom_kernel_|_[0-9a-f]{16}(?=\()|void |\(.*|<.*")


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
            found[_NOISE.sub("", event.name)].append(event.time_range.elapsed_us() * 1e-6)
    rows = [(name, len(times) / repeats, sum(times) / repeats) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])
