"""Small models, stock and converted, and what their conversion says."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from architectures import Architecture, build
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_qlayers import ConversionReport, convert_model

TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
PLAIN = Architecture(2, {}, format=(64, 4, "affine"))
V2 = {
    "topk_method": "greedy",
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def pair(name: str = "qwen2", **config) -> tuple[nn.Module, nn.Module]:
    """The stock model and the converted one."""
    wanted = PLAIN._replace(config=(V2 if name == "deepseek_v2" else {}) | config)
    stock, model = (build(name, wanted) for _ in range(2))
    convert_model(model)
    return stock, model


def add_adapters(model: nn.Module, layers: int) -> None:
    """LoRA on the last layers, that changes what they give."""
    model.freeze()
    mx.random.seed(1)
    linear_to_lora_layers(model, layers, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    for layer in model.modules():
        if "lora_b" in layer:
            layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(2))


def decoded(model: nn.Module, steps: int = 4, cache: list[Any] | None = None) -> mx.array:
    """Logits of a prompt, and of tokens that do not depend on them, with a new cache or this."""
    cache = make_prompt_cache(model) if cache is None else cache
    parts = [model(TOKENS, cache=cache)]
    parts += [model(TOKENS[:, i : i + 1], cache=cache) for i in range(steps)]
    return mx.concatenate(parts, axis=1)


def fusions(report: ConversionReport) -> dict[str, tuple[str, str]]:
    """The actions on modules that share launches, and why, by their paths."""
    return {row.path: (row.action, row.reason) for row in report.fusions}
