"""Decoding and prompts of several architectures, stock mlx-lm beside the converted model.

    python benchmarks/bench_architectures.py
    python benchmarks/bench_architectures.py --models qwen3_moe gpt_oss --what 1 8
    python benchmarks/bench_architectures.py --all

The models have the shapes of well-known ones, few layers and random weights, in bfloat16 and 4 bits
in groups of 64. Stock and converted model share the weights and take turns in one process. A step
is queued behind the one before, as mlx-lm's ``generate_step`` does it. ``--all`` takes a small
model of each architecture that the tests know, one token at a time. ``error`` is how far the
converted model's logits are from stock's in the same steps, as a fraction of their size: both are
rounded. With ``--float32`` it is also said how far both are from the same model in float32.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from common import Table, arguments, output
from decoding_model import quantized
from harness import in_turns
from mlx_lm.models.cache import make_prompt_cache

from mlx_qlayers import convert_model
from mlx_qlayers.decode.engine import stopped

_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "head_dim": 128,
}
_EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
# By name: the module of mlx-lm, and what its configuration has beside what all have.
# fmt: off
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": ("llama", {
        **_LLAMA, "intermediate_size": 14336,
    }),
    "Qwen3 8B": ("qwen3", {
        **_LLAMA, "intermediate_size": 12288,
    }),
    "Phi 3 mini": ("phi3", {
        "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }),
    "Gemma 3 4B": ("gemma3_text", {
        "hidden_size": 2560, "num_hidden_layers": 6, "intermediate_size": 10240,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "sliding_window_pattern": 6,
    }),
    "gpt-oss 20B": ("gpt_oss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128,
    }),
    "Qwen3 30B-A3B": ("qwen3_moe", {
        **_EXPERTS, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }),
    "Moonlight 16B-A3B": ("deepseek_v3", {
        "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446, "q_lora_rank": None,
    }),
    "Qwen3-Next": ("qwen3_next", {
        **_EXPERTS, "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    }),
}
# fmt: on
# The measurements: steps of one and of eight sequences, and a prompt of so many tokens.
WHATS = ("1", "8", "2048")
# Ahead of the names of columns.
_OF = "from float32: "
# Tokens ahead of what is timed.
_CONTEXT = 16


def small(name: str) -> nn.Module:
    """The small model of an architecture with which the tests compare."""
    tests = str(Path(__file__).parents[1] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    architectures = importlib.import_module("architectures")
    table = importlib.import_module("architecture_table").ARCHITECTURES
    model: nn.Module = architectures.build(name, table[name], mx.bfloat16)
    if any("MultiLinear" in type(part).__name__ for part in model.modules()):
        # Of matrices of heads with one group a row MLX has no product on CUDA.
        wider = table[name].config | {"qk_nope_head_dim": 64, "v_head_dim": 64}
        shape = table[name]._replace(config=wider, format=(32, 4, "affine"))
        model = architectures.build(name, shape, mx.bfloat16)
    return model


def begun(model: nn.Module, tokens: mx.array) -> list[Any]:
    """Caches that hold some tokens, taken one by one: MLX compiles products of more for long."""
    cache = make_prompt_cache(model)
    for i in range(tokens.shape[1]):
        mx.eval(model(tokens[:, i : i + 1], cache=cache))
    return cache


def decode(model: nn.Module, tokens: mx.array, steps: int = 32) -> float:
    """Seconds a step behind a context, each queued behind the one before."""
    cache, y = begun(model, tokens), tokens[:, :1]
    mx.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        y = model(y, cache=cache)[:, -1:].argmax(-1)
        mx.async_eval(y)
    mx.eval(y)
    return (time.perf_counter() - start) / steps


def prompt(model: nn.Module, tokens: mx.array) -> float:
    """Seconds for a prompt."""
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    mx.eval(model(tokens, cache=cache)[:, -1])
    mx.synchronize()
    return time.perf_counter() - start


def errors(models: dict[str, nn.Module], tokens: mx.array, float32: bool) -> dict[str, float]:
    """How far the logits of a step are from others, as fractions of their size.

    Stock takes a sequence after the other: with several, MLX on CUDA multiplies the heads of latent
    attention with the first one's matrix.
    """

    def logits(model: nn.Module, parts: mx.array) -> mx.array:
        steps = [model(each[:, :1], cache=begun(model, each)) for each in parts]
        return mx.concatenate(steps).astype(mx.float32)

    def error(y: mx.array, wanted: mx.array) -> float:
        return float(((y - wanted).square().mean() / wanted.square().mean()).sqrt())

    stock, ours = logits(models["stock"], tokens[:, None]), logits(models["ours"], tokens[None])
    found = {"error": error(ours, stock)}
    if float32:
        exact = copy.deepcopy(models["stock"])
        exact.set_dtype(mx.float32)
        wanted = logits(exact, tokens[:, None])
        found |= {f"{_OF}stock": error(stock, wanted), f"{_OF}ours": error(ours, wanted)}
    return found


def converted(stock: nn.Module) -> dict[str, nn.Module]:
    """A model as it is, and a converted one that shares its arrays."""
    ours = copy.deepcopy(stock)
    # Not ahead of time, for all numbers of rows that there could be.
    with mock.patch("mlx_qlayers.convert.compile_kernels"):
        convert_model(ours, verify=False, calibrate=False)
    return {"stock": stock, "ours": ours}


@cache
def built(name: str) -> dict[str, nn.Module]:
    """One of :data:`SHAPES` with random quantized weights, stock and converted."""
    module_name, config = SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{module_name}")
    mx.random.seed(0)
    args = module.ModelArgs.from_dict({"model_type": module_name, **_COMMON, **config})
    return converted(quantized(module.Model(args), 64, 4))


def measured(
    name: str, models: dict[str, nn.Module], what: str, args: argparse.Namespace, vocabulary: int
) -> dict[str, Any]:
    """A row of a model."""
    is_prompt = what == "2048"
    shape = (1, 2048) if is_prompt else (int(what), _CONTEXT)
    tokens = mx.random.randint(0, vocabulary, shape, key=mx.random.key(1))
    compares = "stock" in models and not is_prompt
    far = errors(models, tokens, args.float32) if compares else {"error": None}
    run = prompt if is_prompt else decode
    times = in_turns(models, args.repeats, lambda model: run(model, tokens))
    found = {key: each.scaled(1e3) for key, each in times.items()}
    speedup = found["stock"].median / found["ours"].median if "stock" in found else None
    reason = None if is_prompt else stopped(models["ours"])
    row = {"model": name, "what": what, **found, "x": speedup, **far}
    return row | {"left to the model": reason or ""}


def main() -> None:
    """Run from the command line."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--models", nargs="*", help="names, or parts of them")
    parser.add_argument("--what", nargs="*", choices=WHATS, default=list(WHATS))
    parser.add_argument("--all", action="store_true", help="a small model of each architecture")
    parser.add_argument("--float32", action="store_true", help="errors from float32, too")
    args = parser.parse_args()
    table = Table()
    print("milliseconds a step of 1 or 8 sequences, or for a prompt of 2,048 tokens")
    name = "_small" if args.all else "_float32" if args.float32 else ""
    with output(args, f"architectures{name}"):
        if args.all:
            _small_models(table, args)
            return
        names = [n for m in args.models or SHAPES for n in SHAPES if m in n]
        for what in args.what:
            for name in names:
                table.add(**measured(name, built(name), what, args, _COMMON["vocab_size"]))


def _small_models(table: Table, args: argparse.Namespace) -> None:
    small("llama")
    names = importlib.import_module("architecture_table").ARCHITECTURES
    for name in names:
        if args.models and name not in args.models:
            continue
        models, refused = converted(small(name)), ""
        try:
            begun(models["stock"], mx.zeros((1, 1), mx.int32))
        except Exception as problem:  # where MLX has no operation for its shapes
            refused = f"; stock: {type(problem).__name__}: {problem}"
            del models["stock"]
        try:
            row = measured(name, models, "1", args, 128)
            table.add(**row | {"left to the model": row["left to the model"] + refused})
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {problem}{refused}", flush=True)


if __name__ == "__main__":
    main()
