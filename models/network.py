"""mlx-lm's Qwen2 with what training adds: dropout, mixed precision, and simulated quantization."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.qwen2 import Model, ModelArgs, TransformerBlock

GROUP_SIZE = 64
BITS = 4
INIT_STD = 0.02


class DropoutBlock(TransformerBlock):
    """A Qwen2 block that drops parts of what attention and MLP add to the residual stream."""

    def __init__(self, args: ModelArgs, dropout: float) -> None:
        super().__init__(args)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + self.dropout(self.self_attn(self.input_layernorm(x), mask, cache))
        return h + self.dropout(self.mlp(self.post_attention_layernorm(h)))


class TrainingModel(Model):
    """Qwen2 with dropout of embeddings, of whole tokens and in every block; parameters as there."""

    def __init__(self, args: ModelArgs, dropout: float, token_dropout: float) -> None:
        super().__init__(args)
        self.dropout = nn.Dropout(dropout)
        self.token_dropout = nn.Dropout(token_dropout)
        self.model.layers = [DropoutBlock(args, dropout) for _ in range(args.num_hidden_layers)]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        embeddings = self.dropout(self.model.embed_tokens(inputs))
        embeddings *= self.token_dropout(mx.ones((*inputs.shape, 1), embeddings.dtype))
        return super().__call__(inputs, cache, embeddings)


def init_parameters(model: Model) -> dict[str, Any]:
    """Return float32 parameters: normal weights, narrower where they end in the residual stream."""
    layers = model.args.num_hidden_layers

    def init(path: str, p: mx.array) -> mx.array:
        if p.ndim < 2:
            return mx.zeros_like(p) if path.endswith("bias") else mx.ones_like(p)
        residual = path.endswith(("o_proj.weight", "down_proj.weight"))
        return mx.random.normal(
            p.shape, scale=INIT_STD / (2 * layers) ** 0.5 if residual else INIT_STD
        )

    return tree_unflatten([(path, init(path, p)) for path, p in tree_flatten(model.parameters())])


def fake_quantize(w: mx.array) -> mx.array:
    """Round a matrix to the values that 4-bit storage keeps; its gradient passes unchanged."""
    if w.ndim < 2:
        return w
    stored = w.astype(mx.bfloat16)
    packed = mx.quantize(stored, group_size=GROUP_SIZE, bits=BITS)
    rounded = mx.dequantize(*packed, group_size=GROUP_SIZE, bits=BITS).astype(w.dtype)
    return w + mx.stop_gradient(rounded - w)


def token_losses(
    model: Model, params: dict[str, Any], tokens: mx.array, dtype: mx.Dtype, quantized: bool
) -> mx.array:
    """Return the negative log likelihoods, in nats, of all tokens of a window but its first.

    Args:
        model: The network; its own parameters are replaced.
        params: Float32 parameters.
        tokens: Token ids of shape (B, L + 1).
        dtype: The type to compute in.
        quantized: Whether to round the matrices to what quantization keeps.

    Returns:
        Float32 losses of shape (B, L).
    """
    if quantized:
        params = tree_map(fake_quantize, params)
    model.update(tree_map(lambda p: p.astype(dtype), params))
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:])


def compiled_losses(model: Model, dtype: mx.Dtype, quantized: bool) -> Callable[..., mx.array]:
    """Return a compiled `(params, tokens) -> losses` with dropout off."""

    def losses(params: dict[str, Any], tokens: mx.array) -> mx.array:
        model.eval()
        return token_losses(model, params, tokens, dtype, quantized)

    return mx.compile(losses)
