"""Holds the logits of a quantized model against those of its weights in float32."""

from __future__ import annotations

import copy
import os
from typing import Any

# Dense float32 products are not to be in TF32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models import qwen2
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

# Layers with which results are verified: more than are traced together, and float32 fits.
VERIFIED_LAYERS = 6


def verify(models: dict[str, nn.Module], tokens: mx.array, steps: int, context: int = 0) -> None:
    """Hold the logits of the last ``steps`` tokens, one by one, against dense float32 weights.

    Of each model the first layers are used, and the kernels of the whole. Ahead of the tokens are
    ``context`` random keys and values.

    Raises:
        SystemExit: a model has more than twice the mean error of results that are rounded once.
    """
    few = {name: _first_layers(model) for name, model in models.items()}
    dense = next(iter(few.values()))
    mx.disable_compile()  # to compile for these takes longer than to run them
    truth = _logits(_dense(dense, mx.float32), tokens, steps, context, mx.float32)
    found = {"rounded once": _logits(_dense(dense, mx.bfloat16), tokens, steps, context)}
    mx.eval(truth, found)
    mx.enable_compile()
    found |= {name: _logits(m, tokens, steps, context) for name, m in few.items()}
    errors = {name: float(mx.abs(logits - truth).mean()) for name, logits in found.items()}
    shown = ", ".join(f"{name} {error:.2e}" for name, error in errors.items())
    size = float(mx.abs(truth).mean())
    print(
        f"verified {' x '.join(map(str, tokens.shape))} tokens, mean errors of {size:.2f}: {shown}"
    )
    for name, error in errors.items():
        if not error <= 2 * errors["rounded once"]:
            raise SystemExit(f"{name} is not accurate")


def _first_layers(model: nn.Module) -> nn.Module:
    few = copy.deepcopy(model)
    few.model.layers = few.model.layers[:VERIFIED_LAYERS]
    return few


class _Dense(nn.Module):
    """A quantized layer's function by its weights in float32, rounded once."""

    def __init__(self, layer: nn.Module, dtype: mx.Dtype) -> None:
        super().__init__()
        scales, biases = (a.astype(mx.float32) for a in (layer.scales, layer.biases))
        self.weight = mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits)
        self.looks_up, self.dtype = isinstance(layer, nn.QuantizedEmbedding), dtype
        if "bias" in layer:
            self.bias = layer.bias.astype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        if self.looks_up:
            return self.weight[x].astype(self.dtype)
        y = x.astype(mx.float32) @ self.weight.T
        return (y + self.bias if "bias" in self else y).astype(self.dtype)


def _dense(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    dense = qwen2.Model(model.args)
    dense.model.layers = dense.model.layers[: len(model.layers)]
    dense.update(model.parameters(), strict=False)
    dense.set_dtype(dtype)
    kinds = nn.QuantizedLinear | nn.QuantizedEmbedding
    layers = [(n, _Dense(m, dtype)) for n, m in model.named_modules() if isinstance(m, kinds)]
    dense.update_modules(tree_unflatten(layers))
    return dense


def _logits(
    model: nn.Module,
    tokens: mx.array,
    steps: int,
    context: int,
    dtype: mx.Dtype = mx.bfloat16,
) -> mx.array:
    cache = filled(model, context, dtype) if context else cache_of(model, len(tokens))
    model(tokens[:, :-steps], cache=cache)
    mx.eval([c.state for c in cache])
    parts = [model(part, cache=cache) for part in mx.split(tokens[:, -steps:], steps, axis=1)]
    return mx.concatenate(parts, axis=1).astype(mx.float32)


def cache_of(model: nn.Module, batch: int) -> list[Any]:
    """An empty cache of the kind that mlx-lm uses for so many sequences."""
    cache = make_prompt_cache(model)
    return cache if batch == 1 else [BatchKVCache([0] * batch) for _ in cache]


def filled(model: nn.Module, length: int, dtype: mx.Dtype = mx.bfloat16) -> list[Any]:
    """A cache of one sequence that holds random keys and values, the same in every dtype."""
    args, cache = model.args, make_prompt_cache(model)
    shape = 1, args.num_key_value_heads, length, args.hidden_size // args.num_attention_heads
    for i, each in enumerate(cache):
        keys = mx.random.split(mx.random.key(i))
        each.keys, each.values = (
            mx.random.normal(shape, mx.bfloat16, key=key).astype(dtype) for key in keys
        )
        each.offset = length
    mx.eval([each.state for each in cache])
    return cache
