"""Models of Qwen2's kind with random weights: the time of decoding and of prompts with them.

Their logits are held against those of their weights in float32.
"""

from __future__ import annotations

import copy
import os
import time
from typing import Any

# Dense float32 products are not to be in TF32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import qwen2
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

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
# Layers with which results are verified: more than are traced together, and float32 fits.
VERIFIED_LAYERS = 6


def dense(shape: dict[str, int]) -> nn.Module:
    """A random Qwen2 in bfloat16, with a head of its own as the 7B model has."""
    args = qwen2.ModelArgs("qwen2", rms_norm_eps=1e-6, tie_word_embeddings=False, **shape)
    mx.random.seed(0)
    model = qwen2.Model(args)
    model.set_dtype(mx.bfloat16)
    return model


def build(shape: dict[str, int], group_size: int, bits: int) -> nn.Module:
    """The same quantized."""
    return quantized(dense(shape), group_size, bits)


def quantized(model: nn.Module, group_size: int, bits: int) -> nn.Module:
    """A model of random numbers in bfloat16, quantized and evaluated."""
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size, bits)
    model.eval()
    for layer in model.layers:  # one by one, so that the dense weights do not exist together
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def decode(
    model: nn.Module, prompts: list[list[int]], tokens: int, cache: list[Any] | None = None
) -> float:
    """Seconds for ``tokens`` steps after the first, through mlx-lm's loop.

    One sequence may go on from a cache.
    """
    if len(prompts) == 1:
        prompt = mx.array(prompts[0])
        steps = generate_step(prompt, model, max_tokens=tokens + 1, prompt_cache=cache)
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


def verify(models: dict[str, nn.Module], tokens: mx.array, steps: int, context: int = 0) -> None:
    """Hold the logits of the last ``steps`` tokens, one by one, against dense float32 weights.

    Of each model the first layers are used, and the kernels of the whole. Ahead of the tokens are
    ``context`` random keys and values.

    Raises:
        SystemExit: a model has more than twice the mean error of results that are rounded once.
    """
    few = {name: _first_layers(model) for name, model in models.items()}
    first = next(iter(few.values()))
    mx.disable_compile()  # to compile for these takes longer than to run them
    truth = _logits(_unpacked(first, mx.float32), tokens, steps, context, mx.float32)
    found = {"rounded once": _logits(_unpacked(first, mx.bfloat16), tokens, steps, context)}
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


class _Unpacked(nn.Module):
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


def _unpacked(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    dense = qwen2.Model(model.args)
    dense.model.layers = dense.model.layers[: len(model.layers)]
    dense.update(model.parameters(), strict=False)
    dense.set_dtype(dtype)
    kinds = nn.QuantizedLinear | nn.QuantizedEmbedding
    layers = [(n, _Unpacked(m, dtype)) for n, m in model.named_modules() if isinstance(m, kinds)]
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
