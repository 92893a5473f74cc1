"""Small GGUF files, written as llama.cpp writes them: blocks, names, rows of q and k, norms."""

import json
import re
import struct
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.qwen2 import Model, ModelArgs
from tiny_model import CONFIG, _tokenizer
from tokenizers import Tokenizer

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q5_0": 6, "Q6_K": 14}
# The names of mlx-lm's modules in llama.cpp, and tensors that it keeps otherwise.
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.final_layernorm": "output_norm", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
}  # fmt: skip
_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_KEYS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon", "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def blocks(x: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """The blocks of 32 weights of a matrix, and the values that they stand for."""
    groups = x.astype(np.float32).reshape(-1, 32)
    low = np.zeros((len(groups), 1), np.float16)
    if kind == "Q4_0":
        most = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
        scale, zero = (most / -8).astype(np.float16), 8
    elif kind == "Q4_1":
        low = groups.min(1, keepdims=True).astype(np.float16)
        scale, zero = ((groups.max(1, keepdims=True) - low) / 15).astype(np.float16), 0
    else:
        scale, zero = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16), 0
    wide, first = scale.astype(np.float32), low.astype(np.float32)
    codes = np.round((groups - first) / wide + zero)
    codes = np.clip(codes, -127, 127) if kind == "Q8_0" else np.clip(codes, 0, 15)
    values = ((codes - zero) * wide + first).reshape(x.shape)
    if kind == "Q8_0":
        packed = [scale.view(np.uint8), codes.astype(np.int8).view(np.uint8)]
    else:
        nibbles = codes.astype(np.uint8)
        packed = [scale.view(np.uint8), *([low.view(np.uint8)] if kind == "Q4_1" else [])]
        packed.append(nibbles[:, :16] | nibbles[:, 16:] << 4)
    return np.concatenate(packed, axis=1).tobytes(), values


def random_q6_k(rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random blocks of 256 weights of 6 bits with 16 scales, and their values in float16."""
    rng = np.random.default_rng(0)
    low = rng.integers(256, size=(rows, columns // 256, 2, 2, 32), dtype=np.uint8)
    high = rng.integers(256, size=(rows, columns // 256, 2, 1, 32), dtype=np.uint8)
    scales = rng.integers(-9, 9, size=(rows, columns // 256, 16), dtype=np.int8)
    step = np.full((rows, columns // 256, 1), 0.001, np.float16)
    fours = np.concatenate([low & 15, low >> 4], axis=3)  # quarters of half a block
    twos = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (fours | twos << 4).astype(np.float32).reshape(rows, -1, 16, 16) - 32
    values = codes * scales[..., None] * step.astype(np.float32)[..., None]
    parts = [low, high, scales.view(np.uint8), step.view(np.uint8)]
    data = np.concatenate([part.reshape(rows, columns // 256, -1) for part in parts], axis=2)
    return data.tobytes(), values.reshape(rows, columns).astype(np.float16)


def write(
    path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
) -> Path:
    """Write a file of version 3: the kind, shape and bytes of each tensor by its name."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def scalar(value: Any) -> tuple[int, bytes]:
        if isinstance(value, str):
            return 8, text(value)
        if isinstance(value, bool):
            return 7, struct.pack("<?", value)
        if isinstance(value, int):
            return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
        return 6, struct.pack("<f", value)

    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        if isinstance(value, list):
            items = [scalar(each) for each in value]
            kind, data = 9, struct.pack("<IQ", items[0][0] if items else 8, len(items))
            data += b"".join(item for _, item in items)
        else:
            kind, data = scalar(value)
        head += text(key) + struct.pack("<I", kind) + data
    body = b""
    for name, (kind_name, shape, data) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", KINDS[kind_name], len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def write_model(
    path: Path, architecture: str, model: Any, config: dict[str, Any], kind: str, **metadata: Any
) -> dict[str, Any]:
    """Write mlx-lm's ``model`` as llama.cpp would, and give it the values that the blocks have.

    Returns:
        The written tensors, as :func:`write` takes it.
    """
    gemma = architecture.startswith("gemma")
    tensors, values = {}, {}
    for name, weight in tree_flatten(model.parameters()):
        x = np.array(weight.astype(mx.float32))
        stem, _, leaf = name.rpartition(".")
        layer, stem = re.match(r"(model\.layers\.\d+\.|)(.*)", stem).groups()  # type: ignore[union-attr]
        names = _NAMES | (_NORMS if architecture in ("gemma2", "gemma3") else {})
        name_there = f"blk.{layer.split('.')[2]}." if layer else ""
        name_there += f"{names[stem]}.{leaf}"
        if x.ndim == 2:
            data, x = blocks(x, kind)
            rows = np.frombuffer(data, np.uint8).reshape(len(x), -1)
        else:
            rows = x.astype(np.float32) + (1 if gemma and stem.endswith("norm") else 0)
        values[name] = mx.array(x)
        heads = {
            "self_attn.q_proj": "num_attention_heads",
            "self_attn.k_proj": "num_key_value_heads",
        }
        if architecture == "llama" and stem in heads:
            halves = rows.reshape(config[heads[stem]], 2, -1, *rows.shape[1:])
            rows = halves.swapaxes(1, 2).reshape(rows.shape)
        tensors[name_there] = (kind if x.ndim == 2 else "F32", x.shape, rows.tobytes())
    model.load_weights(list(values.items()))
    facts = {f"{architecture}.{_KEYS[key]}": value for key, value in config.items() if key in _KEYS}
    contents = {
        "metadata": {"general.architecture": architecture, **facts, **metadata},
        "tensors": tensors,
    }
    write(path, **contents)
    return contents


@cache
def byte_level() -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer, and the metadata that describes it."""
    tokenizer = _tokenizer()
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    end = tokenizer.token_to_id("<|endoftext|>")
    about = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token == "<|endoftext|>" else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "eos_token_id": end,
        "add_bos_token": False,
    }
    return tokenizer, {f"tokenizer.ggml.{key}": value for key, value in about.items()}


def save_qwen2(path: Path) -> None:
    """Write a small random model of Qwen2's architecture in Q4_0, with its tokenizer."""
    tokenizer, about = byte_level()
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "head_dim": 32}
    write_model(path, "qwen2", Model(ModelArgs.from_dict(config)), config, "Q4_0", **about)
