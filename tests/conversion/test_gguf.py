"""GGUF files of every architecture and format, against mlx-lm's model with the blocks' values."""

import io
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import sentencepiece
from gguf_files import byte_level, random_q6_k, write, write_model
from mlx_lm.models.rope_utils import Llama3RoPE
from mlx_lm.utils import load_tokenizer
from tiny_model import TEXT
from tokenizers import Tokenizer

from mlx_qlayers import load
from mlx_qlayers.cli import main
from mlx_qlayers.conversion.gguf import read_gguf
from mlx_qlayers.conversion.gguf_tokenizer import save_tokenizer
from tests.numerics import assert_same_model

CONFIG: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "head_dim": 16,
}  # fmt: skip
GEMMA = CONFIG | {"head_dim": 32, "rms_norm_eps": 1e-6}
PHI2 = {k: v for k, v in CONFIG.items() if k not in ("rms_norm_eps", "num_key_value_heads")}
PHI2 |= {"layer_norm_eps": 1e-5, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", CONFIG | {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen2": ("qwen2", CONFIG | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", CONFIG | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("gemma", GEMMA),
    "gemma2": (
        "gemma2",
        GEMMA
        | {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 5.0}
        | {"query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {"num_hidden_layers": 7, "sliding_window": 4, "query_pre_attn_scalar": 32}
        | {"rope_theta": 1e6},
    ),
    "phi2": ("phi", PHI2),
    "phi3": ("phi3", CONFIG | {"tie_word_embeddings": False, "partial_rotary_factor": 0.75}),
}
PROMPT = mx.array([[5, 6, 7, 200, 3, 3, 90, 41, 17]])


def written(
    path: Path, architecture: str, kind: str, change: Any = None, **metadata: Any
) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's model with the values of a file that is written, and what is in the file."""
    model_type, config = FAMILIES[architecture]
    config = config | (change or {})
    tokenizer, about = byte_level()
    module = import_module(f"mlx_lm.models.{model_type}")
    known = {"model_type": model_type, "vocab_size": tokenizer.get_vocab_size()} | config
    mx.random.seed(5)
    model = module.Model(module.ModelArgs.from_dict(known))
    if architecture == "gemma3":
        model.pop("lm_head")
        model.tie_word_embeddings = True
    # Norms and biases that are not 1 and 0.
    model.apply(lambda x: x + 0.1 * mx.random.normal(x.shape) if x.ndim == 1 else x)
    factor = config.get("partial_rotary_factor", 1.0)
    turned = {f"{architecture}.rope.dimension_count": int(factor * config["head_dim"])}
    metadata = about | turned | metadata
    return model, write_model(path, architecture, model, config, kind, **metadata)


@pytest.mark.parametrize(
    ("architecture", "kind"), [*zip(FAMILIES, cycle(["Q4_0", "Q4_1", "Q8_0"]), strict=False)]
)
def test_logits_are_those_of_the_values(architecture, kind, tmp_path):
    stock, _ = written(tmp_path / "model.gguf", architecture, kind)
    model, config = read_gguf(tmp_path / "model.gguf", tmp_path, dtype=mx.float32)
    bits = 8 if kind == "Q8_0" else 4
    assert config["quantization"] == {"group_size": 32, "bits": bits, "mode": "affine"}
    assert_same_model(model(PROMPT), stock(PROMPT), bits=None, what=architecture)
    modules = dict(stock.named_modules())
    packed = [(path, m) for path, m in model.named_modules() if hasattr(m, "scales")]
    assert len(packed) > 2 * config["num_hidden_layers"]
    for path, m in packed:  # code for code
        values = mx.dequantize(m.weight, m.scales, m.biases, 32, bits)
        assert mx.array_equal(values, modules[path].weight), path


def test_the_factors_of_llama_3_are_recognised(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    change = {"rope_scaling": scaling, "rope_theta": 500000.0}
    stock, file = written(tmp_path / "model.gguf", "llama", "Q8_0", change)
    plain = 500000.0 ** (mx.arange(0, 16, 2) / 16)
    factors = np.array(Llama3RoPE(16, base=500000.0, scaling_config=scaling)._freqs / plain)
    file["tensors"]["rope_freqs.weight"] = ("F32", (8,), factors.astype(np.float32).tobytes())
    write(tmp_path / "model.gguf", **file)
    model, config = read_gguf(tmp_path / "model.gguf", tmp_path, dtype=mx.float32)
    assert config["rope_scaling"] == scaling
    assert_same_model(model(PROMPT), stock(PROMPT), bits=None, what="llama 3")
    file["tensors"]["rope_freqs.weight"] = ("F32", (8,), np.arange(1, 9, dtype="f").tobytes())
    with pytest.raises(ValueError, match="other factors"):
        read_gguf(write(tmp_path / "model.gguf", **file), tmp_path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_other_scalings_of_the_rotary_embedding(kind, tmp_path):
    scaling = {"type": kind, "rope_type": kind, "factor": 4.0}
    about = {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 128
        about["qwen2.rope.scaling.original_context_length"] = 128
    path = tmp_path / "model.gguf"
    stock, _ = written(path, "qwen2", "Q4_0", {"rope_scaling": scaling}, **about)
    model, config = read_gguf(path, tmp_path, dtype=mx.float32)
    assert config["rope_scaling"] == scaling
    assert_same_model(model(PROMPT), stock(PROMPT), bits=None, what=kind)


def test_the_long_factors_of_phi_3(tmp_path):
    long, short = [2.0 + i for i in range(6)], [1.0] * 6
    scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
    change = {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    about = {"phi3.rope.scaling.original_context_length": 64}
    path = tmp_path / "model.gguf"
    stock, file = written(path, "phi3", "Q4_0", change, **about)
    for name, values in (("long", long), ("short", short)):
        data = np.array(values, np.float32).tobytes()
        file["tensors"][f"rope_factors_{name}.weight"] = ("F32", (6,), data)
    model, _ = read_gguf(write(path, **file), tmp_path, dtype=mx.float32)
    assert_same_model(model(PROMPT), stock(PROMPT), bits=None, what="longrope")


def test_the_head_of_six_bits_that_llama_cpp_gives(tmp_path):
    path, change = tmp_path / "model.gguf", {"hidden_size": 256, "head_dim": 64}
    stock, file = written(path, "llama", "Q4_0", change)
    data, values = random_q6_k(stock.args.vocab_size, 256)
    file["tensors"]["output.weight"] = ("Q6_K", values.shape, data)
    stock.load_weights([("lm_head.weight", mx.array(values.astype(np.float32)))], strict=False)
    model, _ = read_gguf(write(path, **file), tmp_path, dtype=mx.float32)
    assert_same_model(model(PROMPT), stock(PROMPT), bits=None, what="Q6_K")


def test_q_k_and_v_of_phi_2_in_one(tmp_path):
    path = tmp_path / "model.gguf"
    stock, file = written(path, "phi2", "Q4_1")
    tensors = file["tensors"]
    for layer in range(2):
        for leaf in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{name}.{leaf}") for name in "qkv"]
            shape = (3 * parts[0][1][0], *parts[0][1][1:])
            joined = parts[0][0], shape, b"".join(part[2] for part in parts)
            tensors[f"blk.{layer}.attn_qkv.{leaf}"] = joined
    model, _ = read_gguf(write(path, **file), tmp_path, dtype=mx.float32)
    assert_same_model(model(PROMPT), stock(PROMPT), bits=None, what="phi2")


SENTENCES = [
    "Once upon a time there was a king",
    "  two  spaces",
    "Ein König, 王様 and \u00e9\U0001f600!\n\nline",
    "",
    "a",
]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens_are_those_of_sentencepiece(prefix, tmp_path):
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 3),
        model_writer=trained,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    stock = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    pieces = range(stock.get_piece_size())
    kinds = [(stock.is_control, 3), (stock.is_unknown, 2), (stock.is_byte, 6)]
    about = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [stock.id_to_piece(i) for i in pieces],
        "tokenizer.ggml.scores": [stock.get_score(i) for i in pieces],
        "tokenizer.ggml.token_type": [
            next((kind for check, kind in kinds if check(i)), 4 if i == 3 else 1) for i in pieces
        ],
        "tokenizer.ggml.bos_token_id": stock.bos_id(),
        "tokenizer.ggml.eos_token_id": stock.eos_id(),
        "tokenizer.ggml.unknown_token_id": stock.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    assert stock.id_to_piece(3) == "<think>"
    save_tokenizer(tmp_path, about, len(pieces))
    tokenizer = load_tokenizer(tmp_path)
    for text in SENTENCES:
        tokens = tokenizer.encode(text)
        assert tokens == [stock.bos_id(), *stock.encode(text)], text
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.encode("<think>", add_special_tokens=False)[-1] == 3
    assert tokenizer.encode("</s>", add_special_tokens=False)[-1] == stock.eos_id()
    for name, value, says in (("scores", [0.5], "scores has 1"), ("scores", None, "scores is mi")):
        with pytest.raises(ValueError, match=says):
            save_tokenizer(tmp_path, about | {f"tokenizer.ggml.{name}": value}, len(pieces))


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", ["it", "'s", " 2024", "!", "\n\n", " x"]),
        ("smollm", ["it", "'s", " ", "2", "0", "2", "4", "!", "\n\n", " x"]),
        ("llama-bpe", ["it", "'s", " ", "202", "4", "!\n\n", " x"]),
        ("qwen2", ["it", "'s", " ", "2", "0", "2", "4", "!\n\n", " x"]),
        ("gpt-4o", ["it's", " ", "202", "4", "!\n\n", " x"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre, parts, tmp_path):
    about = byte_level()[1] | {"tokenizer.ggml.pre": pre}
    save_tokenizer(tmp_path, about, 400)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "it's 2024!\n\n x"
    found = [text[slice(*span)] for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == parts


def test_load_convert_and_generate(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    written(path, "qwen2", "Q4_0", None, **{"tokenizer.chat_template": template})
    model, tokenizer = load(path)
    assert any(type(m).__name__ == "QLinear" for m in model.modules())
    assert {w.dtype for w in model.model.layers[0].self_attn.parameters()["q_proj"].values()} == {
        mx.uint32,
        mx.float16,
    }
    assert tokenizer.encode("Once upon") == byte_level()[0].encode("Once upon").ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "king"}], tokenize=False) == (
        "[king]"
    )
    assert tokenizer.eos_token == "<|endoftext|>"
    out = ["--mlx-path", str(tmp_path / "out")]
    assert main(["convert", "--gguf", str(path), *out, "--dtype", "float32"]) == 0
    assert "15 quantized layers" in capsys.readouterr().out
    stock, _ = mlx_lm.load(str(tmp_path / "out"))
    direct, _ = read_gguf(path, tmp_path, dtype=mx.float32)
    assert mx.array_equal(stock(PROMPT), direct(PROMPT))
    assert main(["generate", "--model", str(path), "--prompt", "king", "--max-tokens", "3"]) == 0
    for flags in (["--bits", "4"], ["--hf-path", "x"], ["--mode", "mxfp4"]):
        assert main(["convert", "--gguf", str(path), "--mlx-path", str(tmp_path / "no"), *flags])
        assert not (tmp_path / "no").exists()


def changed(file: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A file with other metadata; None takes an entry away."""
    metadata = file["metadata"] | {k.replace("__", "."): v for k, v in changes.items()}
    return file | {"metadata": {k: v for k, v in metadata.items() if v is not None}}


def test_what_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    _, file = written(path, "qwen2", "Q4_0")
    tensors = file["tensors"]
    without = {k: v for k, v in tensors.items() if k != "blk.1.ffn_up.weight"}
    q5 = tensors | {"output.weight": ("Q5_0", (32, 32), bytes(32 * 22))}
    extra = tensors | {"blk.0.ffn_gate_exps.weight": ("F32", (2,), bytes(8))}
    narrow = tensors | {"blk.0.attn_norm.weight": ("F32", (32,), bytes(128))}
    for name, says in (
        (changed(file, general__architecture="mamba"), "architecture 'mamba'"),
        (changed(file, general__architecture=None), "architecture None"),
        (changed(file, tokenizer__ggml__tokens=None), "tokenizer.ggml.tokens is missing"),
        (changed(file, tokenizer__ggml__merges=None), "tokenizer.ggml.merges is missing"),
        (changed(file, tokenizer__ggml__merges=["a b c"]), "no two tokens"),
        (changed(file, tokenizer__ggml__merges=["nothing here"]), "tokenizer.ggml.merges"),
        (changed(file, tokenizer__ggml__model="rwkv"), "'rwkv'"),
        (changed(file, tokenizer__ggml__pre="none-such"), "'none-such'"),
        (changed(file, tokenizer__ggml__eos_token_id=10**6), "eos_token_id is 1000000"),
        (changed(file, tokenizer__ggml__token_type=[1]), "token_type has 1"),
        (changed(file, tokenizer__ggml__tokens=["x"] * 999), "999 tokens"),
        (changed(file, qwen2__block_count=10**9), "block_count is 1000000000"),
        (changed(file, qwen2__block_count="many"), "'many'"),
        (changed(file, qwen2__embedding_length=128), "embedding_length 128"),
        (changed(file, qwen2__attention__head_count=None), "head_count"),
        (changed(file, qwen2__attention__head_count=8), "k_proj"),
        (changed(file, qwen2__rope__scaling__type="su"), "'su'"),
        (changed(file, general__alignment=7), "general.alignment"),
        (file | {"tensors": without}, "up_proj"),
        (file | {"tensors": q5}, "is Q5_0; what can be read is F32, F16, Q4_0"),
        (file | {"tensors": extra}, "ffn_gate_exps"),
        (file | {"tensors": narrow}, "input_layernorm"),
        (file | {"tensors": {}}, "token_embd.weight is missing"),
    ):
        with pytest.raises(ValueError, match=r"model\.gguf") as caught:
            load(write(path, **name))
        assert says in str(caught.value), (says, str(caught.value))
    _, file = written(path, "phi3", "Q4_0")  # heads too narrow to be turned in part
    write(path, **changed(file, phi3__attention__head_count=65))
    with pytest.raises(ValueError, match=r"model\.gguf"):
        load(path)


def test_damage_is_named_wherever_it_is(tmp_path):
    path = tmp_path / "model.gguf"
    written(path, "qwen2", "Q4_0")
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    header = sound.index(b"token_embd")
    lengths = [0, 3, 8, 30, header, header + 20, len(sound) - 40, *rng.integers(len(sound), size=9)]
    for length in lengths:
        path.write_bytes(sound[:length])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"holds model\.gguf, which is loaded by its own"):
        load(folder)
    path.write_bytes(b"GGUF" + bytes(3) + b"\3" + bytes(16))
    with pytest.raises(ValueError, match="not GGUF of version"):
        load(path)
