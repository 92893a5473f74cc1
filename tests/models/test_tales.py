"""The model in the repository: its files, mlx-lm's own commands on it, and what its card says."""

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_map
from mlx_lm.models.qwen2 import Model
from mlx_lm.utils import dequantize_model
from numerics import TEXT, TEXT_BITS
from safetensors import safe_open

MODELS = Path(__file__).parents[2] / "models"
FOLDER = MODELS / "tales-qwen2"
sys.path.insert(0, str(MODELS))

from corpus import encode, read_tales  # noqa: E402
from evaluate import figures, total_loss  # noqa: E402
from settings import Settings  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

CONFIG = json.loads((FOLDER / "config.json").read_text())
RECORD = json.loads((FOLDER / "training.json").read_text())
CARD = (FOLDER / "README.md").read_text()


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def test_files_are_those_of_an_mlx_lm_checkpoint_and_small() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    assert {"tokenizer.json", "tokenizer_config.json", "README.md", "training.json"} <= names
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 10_000_000


def test_config_is_that_of_a_quantized_qwen2() -> None:
    assert CONFIG["model_type"] == "qwen2" and CONFIG["architectures"] == ["Qwen2ForCausalLM"]
    assert CONFIG["quantization"] == {"group_size": 64, "bits": 4}
    assert 0 < CONFIG["num_key_value_heads"] < CONFIG["num_attention_heads"]
    assert {"rms_norm_eps", "rope_theta", "vocab_size", "tie_word_embeddings"} <= CONFIG.keys()
    end = json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]
    assert CONFIG["eos_token_id"] == end


def test_arrays_are_packed_weights_and_bfloat16() -> None:
    with safe_open(str(FOLDER / "model.safetensors"), framework="np") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    packed = [name for name, kind in kinds.items() if kind == "U32"]
    assert len(packed) == 7 * CONFIG["num_hidden_layers"] + 1
    for name in packed:
        stem = name.removesuffix("weight")
        assert kinds[stem + "scales"] == kinds[stem + "biases"] == "BF16"
    assert set(kinds.values()) == {"U32", "BF16"}
    assert sum(name.endswith("_proj.bias") for name in kinds) == 3 * CONFIG["num_hidden_layers"]


def test_loads_and_predicts_as_well_as_its_card_says() -> None:
    model, _ = mlx_lm.load(str(FOLDER))
    assert type(model) is Model and isinstance(model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    model = dequantize_model(model)
    model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))

    @mx.compile
    def losses(tokens: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    # A part of the held-out tales is enough to see weights or a tokenizer that do not fit the card.
    text = "".join(tale[5000:5750] for tale in read_tales().valid)
    stream = encode(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), [text])
    nats = total_loss(losses, stream, 256, 192, rows=1)
    got = figures(nats, len(stream) - 1, len(text))
    rows = re.findall(r"\| tales \(.*\) \| quantized \| ([\d.]+) \| ([\d.]+) \|", CARD)
    [(perplexity, bits_per_byte)] = [tuple(map(float, row)) for row in rows]
    assert got["perplexity"] == pytest.approx(perplexity, rel=TEXT)
    assert got["bits_per_byte"] == pytest.approx(bits_per_byte, rel=TEXT_BITS)


def test_generates_with_mlx_lm_in_words_of_the_texts(monkeypatch, capsys) -> None:
    command = ["generate", "--model", str(FOLDER), "--prompt", "The king's daughter"]
    command += ["--max-tokens", "16", "--seed", "3", "--verbose", "False"]
    monkeypatch.setattr(sys, "argv", command)
    import_module("mlx_lm.generate").main()
    text = (MODELS / "data" / "grimms_fairy_tales.txt").read_text().lower()
    known = set(re.findall(r"[a-z]+", text))
    # The last word may be cut by the limit.
    words = re.findall(r"[a-z]+", capsys.readouterr().out.lower())[:-1]
    assert len(words) >= 8 and sum(word in known for word in words) >= 0.9 * len(words)


def test_default_settings_are_those_it_was_trained_with() -> None:
    given = RECORD["settings"]
    if RECORD["step"] == given["steps"]:
        given = given | {"minutes": 0.0}
    assert given == Settings().to_dict()
    assert "    python models/train.py\n" in CARD
