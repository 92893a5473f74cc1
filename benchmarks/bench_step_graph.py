"""What the host does for a token: the graph that MLX is given on an NVIDIA GPU, and what it costs.

    python benchmarks/bench_step_graph.py
    python benchmarks/bench_step_graph.py --models qwen2 phi3 --rows 4352

Needs no GPU. Models are of Qwen2-7B's shape in 4 bits, with weights of zeros that take no memory;
kernels are chosen as for an H200 and stand in the graph, but compute nothing. For one sequence's
token are printed: the primitives of its graph by name; those that only describe an array anew;
the kernels by name, with the characters that MLX hashes for each of their launches; inputs and
outputs of all kernels; how often MLX commits, which launches a CUDA graph each time, by its limits
for an H200; Python's calls; and the time of building, the least of many, as the thread's own.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from bench_python_calls import calls
from common import Table, add_output, print_facts, write_output
from decoding_model import QWEN2_7B
from mlx_lm.models.cache import make_prompt_cache
from recorded_gpu import (
    KERNEL,
    Recorded,
    primitives,
    recorded_gpu,
    starting,
    used,
    without_numbers,
    zeros,
)

from mlx_qlayers import convert_model

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "phi3": {},
    "gemma2": {"head_dim": 128, "query_pre_attn_scalar": 128},
    "qwen3_moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
    },
}
# Operations and elements after which MLX commits on an H200: it counts elements as if they were
# bytes (mlx/backend/cuda/device.cpp).
MAX_OPERATIONS, MAX_ELEMENTS = 100, 1000 << 20


def build(name: str, **changes: Any) -> nn.Module:
    """A converted model of that shape."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    config |= QWEN2_7B | MODELS[name] | changes
    model = without_numbers(module.Model(module.ModelArgs.from_dict(config)))
    convert_model(model, verify=False, calibrate=False)
    return model


def begun(model: nn.Module, rows: int) -> list[Any]:
    """Caches of so many rows behind a few tokens."""
    cache = make_prompt_cache(model)
    keys = zeros((1, 4, rows, 128), mx.bfloat16)
    for each in cache:
        each.keys = each.values = keys
        each.offset = rows - 240
    for _ in range(4):
        mx.eval(token(model, cache))
    return cache


def token(model: nn.Module, cache: list[Any]) -> mx.array:
    """The next token, as an array."""
    return model(zeros((1, 1), mx.int32), cache=cache).argmax(-1)


def launches(model: nn.Module, cache: list[Any], seen: list[Recorded]) -> list[Recorded]:
    """The kernels of a token, in turn."""
    return used(seen, token(model, cache))


def commits(kernels: list[Recorded], others: int) -> int:
    """How often MLX commits for a token: at its limits, and at the end."""
    count, operations, elements = 1, others, 0
    for kernel in kernels:
        operations += 1
        elements += sum(kernel.inputs)
        if operations > MAX_OPERATIONS or elements > MAX_ELEMENTS:
            count, operations, elements = count + 1, 0, 0
    return count


def building(model: nn.Module, cache: list[Any], times: int) -> float:
    """Seconds of a token without evaluating it, by the thread's clock: the least."""
    found = []
    for _ in range(times):
        start = time.thread_time()
        y = token(model, cache)
        found.append(time.thread_time() - start)
        mx.eval(y)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rows", nargs="+", type=int, default=[512, 4352, 33024])
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--layers", type=int, default=QWEN2_7B["num_hidden_layers"])
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    columns = ("primitives", "views", "kernels", "inputs", "outputs", "commits", "calls")
    table = Table({"model": 9, "rows": 6, **dict.fromkeys(columns, 10), "building us": 11})
    table.print_header()
    for name in args.models:
        with recorded_gpu() as seen:
            model = build(name, num_hidden_layers=args.layers)
            for rows in args.rows:
                cache = begun(model, rows)
                y = token(model, cache)
                found = primitives(y)
                mx.eval(y)
                kernels = launches(model, cache, seen)
                others = starting(found) - found[KERNEL]
                sizes = {
                    "primitives": found.total(),
                    "views": found.total() - starting(found),
                    "kernels": len(kernels),
                    "inputs": sum(len(kernel.inputs) for kernel in kernels),
                    "outputs": sum(kernel.outputs for kernel in kernels),
                    "commits": commits(kernels, others),
                    "calls": calls(lambda model=model, cache=cache: token(model, cache)),
                    "building us": 1e6 * building(model, cache, args.times),
                }
                table.add(model=name, rows=rows, **sizes)
                print("   ", ", ".join(f"{n} {what}" for what, n in found.most_common()))
            counted = Counter((kernel.name, kernel.text) for kernel in kernels)
            print("    of", ", ".join(f"{n} {k} ({size})" for (k, size), n in counted.items()))
    write_output(args, "step_graph", [table])


if __name__ == "__main__":
    main()
