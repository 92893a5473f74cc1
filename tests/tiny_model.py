"""Small random checkpoints, of Qwen2 if nothing else is asked for, saved as mlx-lm saves them."""

import contextlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = """Once upon a time there was a king who had a great forest near his palace, full of all
kinds of wild animals. One day he sent out a huntsman to shoot him a roe, but he did not come
back. Perhaps some accident has befallen him, said the king, and the next day he sent out two more
huntsmen who were to search for him, but they too stayed away."""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128,
    "num_hidden_layers": 2, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def save_tiny_model(
    path: Path,
    *,
    quantized: bool = True,
    seed: int = 0,
    dtype: mx.Dtype = mx.bfloat16,
    endless: bool = False,
    **changes: Any,
) -> Path:
    """Write a random model of two layers, with a byte-level tokenizer, into ``path``.

    The token that ends a text of an ``endless`` model is none that the model can give.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    end = None if endless else tokenizer.token_to_id("<|endoftext|>")
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end} | changes
    mx.random.seed(seed)
    kind = import_module(f"mlx_lm.models.{config['model_type']}")
    model = kind.Model(kind.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if quantized:
        with contextlib.redirect_stdout(None):
            model, config = quantize_model(model, config, 64, 4)
    save_model(path, model)
    save_config(config, path / "config.json")
    tokenizer.save(str(path / "tokenizer.json"))
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|never|>" if endless else "<|endoftext|>",
        },
    )
    _write(path / "generation_config.json", {"eos_token_id": end})
    return path


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
