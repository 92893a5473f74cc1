"""A small Qwen2 model, and what it holds."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen2

ARGS = qwen2.ModelArgs("qwen2", 128, 2, 192, 4, 1e-6, 96, 2, tie_word_embeddings=True)
TOKENS = mx.array([[5, 17, 3, 60, 2, 9, 44]])
BASE = {"group_size": 64, "bits": 4}
Q0 = "model.layers.0.self_attn.q_proj"


def qwen(quantized: bool = True, seed: int = 0, **fmt) -> nn.Module:
    mx.random.seed(seed)
    model = qwen2.Model(ARGS)
    if quantized:
        nn.quantize(model, **(fmt or BASE))
    model.eval()
    return model


def snapshot(model: nn.Module):
    """Types, attributes and arrays by path; equal snapshots mean an untouched model."""
    return {
        path: (type(m), dict(vars(m)), {k: id(v) for k, v in m.items()})
        for path, m in model.named_modules()
    }
