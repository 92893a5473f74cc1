"""Turns trained parameters into an mlx-lm directory, and measures what is in it."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from corpus import END
from evaluate import figures, total_loss
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.models.qwen2 import Model, ModelArgs
from mlx_lm.utils import dequantize_model, quantize_model, save_config, save_model
from network import BITS, GROUP_SIZE, INIT_STD
from settings import Settings
from tokenizers import Tokenizer


def model_config(settings: Settings, vocab_size: int, end: int) -> dict[str, Any]:
    """Return config.json with the keys that Qwen2's own checkpoints have."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "hidden_act": "silu",
        "hidden_size": settings.hidden,
        "initializer_range": INIT_STD,
        "intermediate_size": settings.intermediate,
        "max_position_embeddings": 2 * settings.context,
        "max_window_layers": settings.layers,
        "model_type": "qwen2",
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "num_key_value_heads": settings.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": not settings.untied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def bfloat16_model(params: dict[str, Any], config: dict[str, Any]) -> Model:
    """Return mlx-lm's model with the parameters rounded to bfloat16."""
    model = Model(ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: p.astype(mx.bfloat16), params))
    return model.eval()


# A chat continues what was said; the model has no turns of its own.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the tokenizer as a fast one that transformers loads as Qwen2's."""
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "content": END,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(tokenizer.token_to_id(END)): special},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": max_length,
        "pad_token": END,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def export(
    params: dict[str, Any], config: dict[str, Any], tokenizer: Tokenizer, folder: Path
) -> None:
    """Quantize the parameters and write the directory, which appears only when it is whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model, quantized = quantize_model(bfloat16_model(params, config), config, GROUP_SIZE, BITS)
    quantized["quantization"] = {"group_size": GROUP_SIZE, "bits": BITS}
    save_model(partial, model)
    save_config(quantized, partial / "config.json")
    write_tokenizer(tokenizer, partial, config["max_position_embeddings"])
    generation = {
        "bos_token_id": config["bos_token_id"],
        "do_sample": True,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["eos_token_id"],
        "temperature": 0.7,
        "top_p": 0.9,
    }
    (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def measure(
    params: dict[str, Any],
    config: dict[str, Any],
    folder: Path,
    valid: dict[str, Any],
    settings: Settings,
) -> dict[str, Any]:
    """Evaluate the parameters in bfloat16 and the quantized weights as written to `folder`.

    Args:
        params: The parameters that were exported.
        config: The model's configuration.
        folder: The exported directory.
        valid: For each source its held-out token stream and its size in bytes.
        settings: The settings of the run.

    Returns:
        For each source the size of its held-out part, and figures of both models.
    """
    models = {
        "bfloat16": bfloat16_model(params, config),
        "quantized": dequantize_model(load(str(folder))[0]),
    }
    results: dict[str, Any] = {}
    for name, (stream, size) in valid.items():
        results[name] = {"tokens": len(stream) - 1, "bytes": size}
        for kind, model in models.items():
            model.update(tree_map(lambda p: p.astype(settings.compute_dtype), model.parameters()))

            def losses(tokens: mx.array, model: nn.Module = model) -> mx.array:
                logits = model(tokens[:, :-1]).astype(mx.float32)
                return nn.losses.cross_entropy(logits, tokens[:, 1:])

            nats = total_loss(losses, stream, settings.context, settings.context // 2)
            results[name][kind] = figures(nats, len(stream) - 1, size)
    return results
