"""Models in GGUF files, with the blocks of their packed weights as they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .gguf_file import Header, Tensor, read_header
from .gguf_tokenizer import save_tokenizer

_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
GROUP_SIZE = 32
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA2 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI2 = {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
# Tensors of factors, which become part of the configuration.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class _Architecture:
    """How a family's files differ from mlx-lm's model of it."""

    model_type: str  # mlx-lm's name
    names: Mapping[str, str] = field(default_factory=dict)  # of modules, unless as in `_NAMES`
    permuted: bool = False  # the rows of q and k are those of the other kind of rotary embedding
    norm: float = 0.0  # what the file's weights of norms have more
    partial: bool = False  # the rotary embedding may rotate a part of a head
    dtype: mx.Dtype = mx.float16  # of what is not packed; activations of Gemma overflow float16
    epsilon: str = "layer_norm_rms_epsilon"  # the key of the norms' epsilon


_ARCHITECTURES = {
    "llama": _Architecture("llama", permuted=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "gemma": _Architecture("gemma", norm=1.0, dtype=mx.bfloat16),
    "gemma2": _Architecture("gemma2", _GEMMA2, norm=1.0, dtype=mx.bfloat16),
    "gemma3": _Architecture("gemma3_text", _GEMMA2, norm=1.0, dtype=mx.bfloat16),
    "phi2": _Architecture("phi", _PHI2, partial=True, epsilon="layer_norm_epsilon"),
    "phi3": _Architecture("phi3", {"ffn_up": "mlp.gate_up_proj"}, partial=True),
}


def read_gguf(
    path: Path, folder: Path, *, dtype: mx.Dtype | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model of a GGUF file, its weights not evaluated, and its configuration.

    Q4_0, Q4_1 and Q8_0 blocks become MLX's packed weights in groups of 32, code for code. Q6_K,
    which a Q4_0 file has in its head or embedding, is unpacked: MLX has no such blocks. ``dtype``
    is that of what is not packed, scales and biases included: by default float16, as in the file,
    and bfloat16 for Gemma. ``config.json`` and the tokenizer's files are written into ``folder``.

    A ``FileNotFoundError`` or ``ValueError`` names the file, and what is damaged in it, or of a
    kind that cannot be read: the architecture, a tensor or the tokenizer.

    Example:
        >>> model, config = read_gguf(Path("qwen2.5-0.5b-instruct-q4_0.gguf"), Path())
        >>> config["quantization"]
        {'group_size': 32, 'bits': 4, 'mode': 'affine'}
    """
    header = read_header(path)
    try:
        name = header.metadata.get("general.architecture")
        if name not in _ARCHITECTURES:
            raise ValueError(f"architecture {name!r}; what can be read is {list(_ARCHITECTURES)}")
        architecture = _ARCHITECTURES[name]
        config = _config(name, architecture, header)
        save_tokenizer(folder, header.metadata, config["vocab_size"])
        arrays = mx.load(str(path), format="gguf")
        assert isinstance(arrays, dict)
        config |= _rope_scaling(name, config, header.metadata, arrays)
        weights = _weights(architecture, config, arrays, dtype or architecture.dtype)
        model = _build(config, weights)
    except (ValueError, RuntimeError, TypeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from error
    (folder / "config.json").write_text(json.dumps(config))
    return model, config


def _config(name: str, architecture: _Architecture, header: Header) -> dict[str, Any]:
    """``config.json``, but for the scaling of the rotary embedding."""

    def get(key: str, default: Any = None) -> Any:
        value = header.metadata.get(f"{name}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:  # a value for each layer
            value = value[0]
        if type(value) not in (int, float) or value <= 0:
            raise ValueError(f"{name}.{key} must be a positive number, not {value!r}")
        return value

    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("the matrix token_embd.weight is missing")
    layers = {key.split(".")[1] for key in header.tensors if key.startswith("blk.")}
    hidden, heads = get("embedding_length"), get("attention.head_count")
    if embedding.shape[1] != hidden:
        raise ValueError(f"token_embd.weight is {embedding.shape}, embedding_length {hidden}")
    if get("block_count") != len(layers):
        raise ValueError(f"{name}.block_count is {get('block_count')}; {len(layers)} are there")
    head_dim = get("attention.key_length", hidden // heads)
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim and not architecture.partial:
        raise ValueError(f"{name}.rope.dimension_count is {rotated}, of heads of {head_dim}")
    config = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head_dim,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    epsilon = get(f"attention.{architecture.epsilon}")
    config["rms_norm_eps" if "rms" in architecture.epsilon else "layer_norm_eps"] = epsilon
    if name in ("gemma2", "gemma3"):
        # As llama.cpp has it, the largest model alone scales by its width.
        largest = len(layers) == {"gemma2": 46, "gemma3": 62}[name]
        config["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
    if name == "gemma2":
        for cap, usual in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            config[cap] = get(cap, usual)
    if name == "gemma3":
        config["sliding_window"] = get("attention.sliding_window")
    ends = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    config["eos_token_id"] = sorted({end for end in ends if isinstance(end, int)})
    return config | _quantization(architecture, header.tensors)


def _quantization(architecture: _Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The entry of the usual number of bits, and one for each layer that has another."""
    bits = {
        _renamed(key.removesuffix(".weight"), architecture): _BITS[tensor.kind]
        for key, tensor in tensors.items()
        if tensor.kind in _BITS
    }
    if not bits:
        return {}
    usual = Counter(bits.values()).most_common(1)[0][0]
    entry: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": usual, "mode": "affine"}
    others = {path: {**entry, "bits": n} for path, n in bits.items() if n != usual}
    return {"quantization": entry | others}


def _rope_scaling(
    name: str, config: dict[str, Any], metadata: dict[str, Any], arrays: dict[str, mx.array]
) -> dict[str, Any]:
    """The settings of the rotary embedding, from metadata and tensors of factors."""
    factors: dict[str, Any] = {
        key.split(".")[0]: arrays.pop(key).tolist() for key in _FACTORS if key in arrays
    }
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    factor = metadata.get(f"{name}.rope.scaling.factor")
    original = metadata.get(f"{name}.rope.scaling.original_context_length")
    scaling: dict[str, Any]
    if "rope_freqs" in factors and name == "llama":
        scaling = _llama3(config, factors["rope_freqs"])
    elif name == "phi3" and {"rope_factors_long", "rope_factors_short"} <= factors.keys():
        scaling = {"type": "longrope", "rope_type": "longrope"}
        scaling |= {f"{n}_factor": factors[f"rope_factors_{n}"] for n in ("long", "short")}
        scaling["original_max_position_embeddings"] = original
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    elif factors:
        raise ValueError(f"{name} with {', '.join(factors)} cannot be read")
    elif kind == "linear" and name in ("llama", "qwen2", "qwen3", "gemma3", "phi3"):
        scaling = {"type": "linear", "rope_type": "linear", "factor": float(factor or 1)}
    elif kind == "yarn" and name in ("llama", "qwen2", "qwen3"):
        scaling = {"type": "yarn", "rope_type": "yarn", "factor": float(factor or 1)}
        scaling["original_max_position_embeddings"] = original
    elif kind == "none":
        return {}
    else:
        raise ValueError(f"{name}.rope.scaling.type is {kind!r}, which cannot be read")
    return {"rope_scaling": scaling}


def _llama3(config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, of which files have the factors that follow."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaling = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dims, base = config["head_dim"], config["rope_theta"]
    plain = base ** (mx.arange(0, dims, 2) / dims)
    found = Llama3RoPE(dims, base=base, scaling_config=scaling)._freqs / plain
    if len(factors) != dims // 2 or not mx.allclose(found, mx.array(factors), rtol=1e-3).item():
        raise ValueError("rope_freqs.weight has other factors than Llama 3's")
    return scaling


def _renamed(module: str, architecture: _Architecture) -> str:
    """mlx-lm's path of a module: ``blk.0.attn_q`` is ``model.layers.0.self_attn.q_proj``."""
    names = _NAMES | dict(architecture.names)
    layer, stem = "", module
    if module.startswith("blk."):
        _, number, stem = module.split(".", 2)
        layer = f"model.layers.{number}."
    if stem not in names:
        raise ValueError(f"tensor {module!r} is none that {architecture.model_type} has")
    return layer + names[stem]


def _weights(
    architecture: _Architecture,
    config: dict[str, Any],
    arrays: dict[str, mx.array],
    dtype: mx.Dtype,
) -> dict[str, mx.array]:
    """The parameters of mlx-lm's model."""
    weights: dict[str, mx.array] = {}
    for key, value in arrays.items():
        stem, _, leaf = key.rpartition(".")
        path = _renamed(stem, architecture)
        if architecture.norm and path.endswith("norm"):
            value = value - architecture.norm
        if value.dtype != mx.uint32:
            value = value.astype(dtype)
        for head, key_name in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if architecture.permuted and path.endswith(f".{head}_proj"):
                value = _unpermuted(value, config[key_name])
        if architecture.model_type == "phi" and path.endswith("qkv_proj"):
            for part, name in zip(mx.split(value, 3), "qkv", strict=True):
                weights[f"{path.removesuffix('qkv_proj')}{name}_proj.{leaf}"] = part
        else:
            weights[f"{path}.{leaf}"] = value
    return weights


def _unpermuted(rows: mx.array, heads: int) -> mx.array:
    """Rows in pairs (0, 1), (2, 3) of a head as the two halves that mlx-lm rotates."""
    pairs = mx.arange(rows.shape[0]).reshape(heads, -1, 2)
    return rows[pairs.swapaxes(1, 2).flatten()]


def _build(config: dict[str, Any], weights: dict[str, mx.array]) -> nn.Module:
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if (quantization := config.get("quantization")) is not None:

        def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
            return f"{path}.scales" in weights and quantization.get(path, True)

        nn.quantize(model, GROUP_SIZE, quantization["bits"], class_predicate=packed)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model
