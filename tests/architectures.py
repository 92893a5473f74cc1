"""Small random models of the architectures that mlx-lm ships, quantized."""

import contextlib
import copy
import importlib
import io
import zlib
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import quantize_model

VOCABULARY = 128
# Every architecture takes from these what its configuration has a name for.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "partial_rotary_factor": 1.0, "attention_bias": True, "mlp_bias": False, "use_bias": False,
    "tie_word_embeddings": False, "sliding_window": 8, "use_qk_norm": True,
    # Mixtures of experts
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # Latent attention
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    # Scales
    "attention_multiplier": 0.2, "embedding_multiplier": 2.0, "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    # State-space and linear attention layers
    "conv_kernel": 4, "state_size": 16, "use_conv_bias": True, "n_groups": 1,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
}  # fmt: skip
# One of these is taken for each architecture, by its name.
_FORMATS = [
    (64, 4, "affine"), (32, 4, "affine"), (64, 8, "affine"), (32, 8, "affine"), (32, 3, "affine"),
    (64, 5, "affine"), (32, 6, "affine"), (32, 2, "affine"), (32, 4, "mxfp4"), (32, 8, "mxfp8"),
    (16, 4, "nvfp4"),
]  # fmt: skip


class Architecture(NamedTuple):
    """The settings of a small model of an architecture, and the result of its conversion."""

    patched: int  # attention modules that are swapped
    config: dict[str, Any]  # what its configuration needs beside the common values
    left: int = 0  # attention modules that compute on their own
    without: tuple[str, ...] = ()  # kinds of caches with which mlx-lm's own model fails
    format: tuple[int, int, str] | None = None  # where that which its name gives does not do


_last: dict[str, nn.Module] = {}  # the model that was built last: most tests take it twice


def build(name: str, architecture: Architecture, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A copy of the model: the same one in every call, in evaluation mode."""
    key = repr((name, architecture, dtype))
    if key not in _last:
        _last.clear()
        _last[key] = _quantized(name, architecture, dtype)
    model = copy.deepcopy(_last[key])
    # Numbers of its own, which a test may change in place.
    model.update(tree_map(lambda x: x * mx.array(1, x.dtype), model.parameters()))
    mx.eval(model.parameters())
    return model


def _quantized(name: str, architecture: Architecture, dtype: mx.Dtype) -> nn.Module:
    model, seed = unquantized(name, architecture, dtype), zlib.crc32(name.encode())
    allowed = getattr(model, "quant_predicate", None) or (lambda path, layer: True)
    group_size, bits, mode = architecture.format or _FORMATS[seed % len(_FORMATS)]
    with contextlib.redirect_stdout(io.StringIO()):
        quantize_model(
            model,
            {},
            group_size,
            bits,
            mode,
            # The fused layers of afm7 know no modes: mlx-lm fails to quantize them itself.
            quant_predicate=lambda path, layer: (
                type(layer).__name__ != "FusedLinear" and allowed(path, layer)
            ),
        )
    model.eval()
    mx.eval(model.parameters())
    return model


def unquantized(name: str, architecture: Architecture, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The model before it is quantized."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, **_COMMON, **architecture.config}
    config |= {"text_config": {**config, **config.pop("text_config", {})}}
    mx.random.seed(zlib.crc32(name.encode()))
    model: nn.Module = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    model.update(tree_map(lambda p: _perturbed(p, dtype), model.parameters()))
    return model


def _perturbed(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Noise on what starts as a constant: norms, biases, sinks and the like."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if array.ndim == 1 or not mx.any(array).item():
        array = array + 0.1 * mx.random.normal(array.shape)
    return array.astype(dtype)
