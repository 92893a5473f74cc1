"""The graph that MLX is given for a token on an NVIDIA GPU, recorded without one.

Models are of Qwen2-7B's shape in 4 bits, with weights of zeros that take no memory; kernels are
chosen as for an H200 and stand in the graph, but compute nothing.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from recorded_gpu import Recorded, used, without_numbers, zeros

from mlx_qlayers import convert_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from decoding_model import QWEN2_7B

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "phi3": {},
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
