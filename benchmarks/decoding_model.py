"""Models of Qwen2's kind with random weights, and the time of decoding and of prompts with them."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from verified_model import cache_of

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


def begun(model: nn.Module, prompts: mx.array) -> tuple[mx.array, list[Any]]:
    """The next tokens of prompts and the caches that hold them, of which none is about to grow."""
    cache = cache_of(model, len(prompts))
    y = model(prompts, cache=cache)[:, -1:].argmax(-1)
    y = model(y, cache=cache).argmax(-1)
    mx.eval(y, [c.state for c in cache])
    return y, cache
