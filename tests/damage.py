"""Damaged model directories, and what must be said of each."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Case:
    """A model spoilt by ``damage``, and what must be said about it."""

    name: str
    damage: Callable[[Path], Any]
    says: tuple[str, ...]
    error: type[Exception] = ValueError

    def __str__(self) -> str:
        return self.name


def remove(*names: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return damage


def write(name: str, text: str | bytes) -> Callable[[Path], Any]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda path: (path / name).write_bytes(data)


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path / name, int((path / name).stat().st_size * keep))

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    """Change keys of config.json; a value of ... removes the key, a dict changes inside."""

    def damage(path: Path) -> None:
        values = json.loads((path / "config.json").read_text())
        _change(values, changes)
        (path / "config.json").write_text(json.dumps(values))

    return damage


def quantization(**changes: Any) -> Callable[[Path], None]:
    return config(quantization=changes, quantization_config=changes)


def header_of(path: Path, text: str) -> None:
    """Put a text in the place of model.safetensors' header, and keep the data."""
    file = path / "model.safetensors"
    raw, data = file.read_bytes(), text.encode()
    data_of_tensors = raw[8 + int.from_bytes(raw[:8], "little") :]
    file.write_bytes(len(data).to_bytes(8, "little") + data + data_of_tensors)


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Rewrite the header of model.safetensors and keep its data."""

    def damage(path: Path) -> None:
        raw = (path / "model.safetensors").read_bytes()
        entries = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        header_of(path, json.dumps(change(entries) or entries))

    return damage


def entry(**changes: Any) -> Callable[[Path], None]:
    """Change the header's entry of the last norm."""
    return header(lambda entries: _change(entries["model.norm.weight"], changes))


def merge_special(path: Path) -> None:
    """Let the tokenizer merge a special token with another, on which its library panics."""
    document = json.loads((path / "tokenizer.json").read_text())
    document["model"]["merges"][3][0] = "<|endoftext|>"
    (path / "tokenizer.json").write_text(json.dumps(document))


def rename_shard(path: Path) -> None:
    """As if the only shard of a sharded model had not been downloaded."""
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00002-of-00002.safetensors")
    (path / INDEX).write_text(json.dumps(index))
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    header_of_first = path / "model-00001-of-00002.safetensors"
    header_of_first.write_bytes((2).to_bytes(8, "little") + b"{}")


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def to_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a directory")


def duplicate_tensor(path: Path) -> None:
    shutil.copy(path / "model.safetensors", path / "model-2.safetensors")


def repeat_key(path: Path) -> None:
    entry_text = json.dumps({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})[1:-1]
    header_of(path, f"{{{entry_text}, {entry_text}}}")


def pipe(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return damage


def link(name: str, target: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(target)

    return damage


def index_of(file: str) -> Callable[[Path], Any]:
    """An index of a tensor that no file has."""
    return write(INDEX, json.dumps({"weight_map": {"model.absent": file}}))


def only_torch(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    (path / INDEX).unlink()


def drop_tensor(path: Path) -> None:
    """Leave a weight out of the header: its bytes become a hole that nothing points to."""
    header(lambda entries: entries.pop("model.layers.0.mlp.up_proj.scales") and None)(path)
    (path / INDEX).unlink()


def _change(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if value is ...:
            del values[key]
        elif isinstance(value, dict) and isinstance(values.get(key), dict):
            _change(values[key], value)
        else:
            values[key] = value


UP = "model.layers.0.mlp.up_proj"
CASES = [
    # The directory
    Case("path does not exist", shutil.rmtree, ("no such directory",), FileNotFoundError),
    Case("a file, not a directory", to_file, ("model is a directory",), NotADirectoryError),
    Case("empty directory", empty, ("the directory is empty",), FileNotFoundError),
    # config.json
    Case("config.json missing", remove("config.json"), ("config.json",), FileNotFoundError),
    Case("config.json truncated", cut("config.json", 0.5), ("config.json", "JSON")),
    Case("config.json empty", write("config.json", ""), ("config.json", "empty")),
    Case("config.json not JSON", write("config.json", "a: 1"), ("config.json", "JSON")),
    Case("config.json not text", write("config.json", b"\xff\xfe\x00{"), ("config.json", "UTF-8")),
    Case("config nested deep", write("config.json", "[" * 100_000), ("config.json",)),
    Case("config.json a list", write("config.json", "[1]"), ("config.json", "a list")),
    Case("model_type missing", config(model_type=...), ("config.json", "model_type")),
    Case("model_type a number", config(model_type=3), ("model_type", "3")),
    Case("model_type unknown", config(model_type="qwen99"), ("qwen99",)),
    Case("hidden_size missing", config(hidden_size=...), ("hidden_size",)),
    Case("hidden_size a string", config(hidden_size="wide"), ("hidden_size", "'wide'")),
    Case("vocab_size negative", config(vocab_size=-4), ("vocab_size", "-4")),
    Case("num_hidden_layers 2.5", config(num_hidden_layers=2.5), ("layers", "2.5")),
    Case("rope_scaling unknown", config(rope_scaling={"type": "magic", "factor": 2.0}),
     ("mlx-lm builds no qwen2", "magic")),
    Case("num_hidden_layers 10**9", config(num_hidden_layers=10**9),
     ("config.json", "'num_hidden_layers' is 1000000000")),
    Case("num_hidden_layers 10**9 of a part", config(text_config={"num_hidden_layers": 10**9}),
     ("config.json", "'text_config.num_hidden_layers' is 1000000000")),
    Case("no attention heads", config(num_attention_heads=0), ("attention_heads", "0")),
    Case("more heads than width", config(num_attention_heads=256), ("config.json", "256", "128")),
    Case("no key-value heads", config(num_key_value_heads=0), ("self_attn", "(0, 128)")),
    Case("narrower than a group", config(intermediate_size=1),
     ("config.json", "model.layers.0.mlp.gate_proj", "(1, 128)", "(192, 2)")),
    Case("rope_theta 0", config(rope_theta=0), ("rope_theta", "not 0")),
    Case("rope_theta a list", config(rope_theta=[]), ("rope_theta", "not []")),
    Case("rope_theta text", config(rope_theta="fast"), ("rope_theta", "'fast'")),
    Case("sliding_window text", config(sliding_window="x"), ("_window", "not 'x'")),
    Case("config.json a pipe", pipe("config.json"), ("config.json", "a pipe")),
    Case("config.json a device", link("config.json", "/dev/zero"), ("a device",)),
    Case("config.json of long numbers", write("config.json", '{"a": ' + "9" * 5000 + "}"),
     ("config.json", "4300")),
    Case("control characters", config(model_type="\x1b]0;mine\x07"), (r"\x1b]0;mine\x07",)),
    Case("more layers than weights", config(num_hidden_layers=3), ("model.layers.2",)),
    Case("other width than the weights", config(hidden_size=256), ("shape",)),
    Case("code of its own", config(model_file="model.py"),
     ("config.json", "model.py", "trust_remote_code")),
    # quantization
    Case("group_size 48", quantization(group_size=48), ("group_size", "48")),
    Case("bits 9", quantization(bits=9), ("bits", "9")),
    Case("mode unknown", quantization(mode="int4"), ("mode", "int4")),
    Case("bits a string", quantization(bits="4"), ("bits", "'4'")),
    Case("bits true", quantization(bits=True), ("bits", "True")),
    Case("group_size missing", quantization(group_size=...), ("group_size",)),
    Case("quantization a string", config(quantization="4bit", quantization_config="4bit"),
     ("quantization", "4bit")),
    Case("bits contradict the arrays", quantization(bits=8), ("bits", "8", "4")),
    Case("group_size contradicts the arrays", quantization(group_size=32),
     ("group_size", "32", "64")),
    Case("bits of one layer contradict", quantization(**{UP: {"group_size": 64, "bits": 8}}),
     (UP, "bits", "8", "4")),
    Case("a packed layer said not to be", quantization(**{UP: False}), (UP, "not quant")),
    Case("mode contradicts", quantization(mode="mxfp4", group_size=32), ("mxfp4",)),
    Case("width of a group does not divide", quantization(lm={"group_size": 100}),
     ("lm.group_size", "100")),
    Case("layer named by control characters", quantization(**{"\x1b[2J": {"bits": 4}}),
     ("quantization", r"'\x1b[2J'")),
    Case("layer entry a number", quantization(**{UP: 4}), (UP, "4")),
    # model.safetensors
    Case("weights missing", remove("model.safetensors", INDEX), (".safetensors",),
     FileNotFoundError),
    Case("weights of torch", only_torch, ("pytorch_model.bin",), FileNotFoundError),
    Case("weights truncated", cut("model.safetensors", 0.6),
     ("model.safetensors", "model.layers.", "exceeding the size of the file")),
    Case("weights a pipe", pipe("model.safetensors"), ("model.safetensors", "a pipe")),
    Case("weights linked in a circle", link("model.safetensors", "model.safetensors"),
     ("model.safetensors", "no such file"), FileNotFoundError),
    Case("weights linked to nothing", link("model.safetensors", "absent"),
     ("model.safetensors", "no such file"), FileNotFoundError),
    Case("another file a pipe", pipe("generation_config.json"), ("n_config.json", "a pipe")),
    Case("header nested deep", lambda path: header_of(path, "[" * 100_000),
     ("model.safetensors", "header cannot be read")),
    Case("header truncated", cut("model.safetensors", 0.001), ("cut short",)),
    Case("weights empty", write("model.safetensors", ""), ("0 bytes",)),
    Case("header length of 2**60",
     write("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"), (str(1 << 60),)),
    Case("header not JSON", write("model.safetensors", (8).to_bytes(8, "little") + b"{'a': 1}"),
     ("header cannot be read",)),
    Case("header a list", header(lambda _: [1]), ("header is a list",)),
    Case("header repeats a tensor", repeat_key, ("'x' appears twice",)),
    Case("offsets beyond the file", entry(data_offsets=[0, 1 << 40]),
     ("model.norm.weight", str(1 << 40))),
    Case("offsets reversed", entry(data_offsets=[8, 0]), ("norm.weight", "(8, 0)")),
    Case("offsets of text", entry(data_offsets="0-8"), ("model.norm.weight", "0-8")),
    Case("entry a number", header(lambda entries: entries.update(x=1)), ("'x'", "not 1")),
    Case("entry of no shape", entry(shape=...), ("model.norm.weight", "shape")),
    Case("scales of one axis", header(lambda entries: entries[f"{UP}.scales"].update(shape=[384])),
     (UP, "(192, 128)", "(384,)")),
    Case("scales of no group",
     header(lambda entries: entries[f"{UP}.scales"].update(shape=[192, 0], data_offsets=[0, 0])),
     (UP, "(192, 128)", "(192, 0)")),
    Case("shape too large", entry(shape=[1000]), ("model.norm.weight", "2000 bytes")),
    Case("shape negative", entry(shape=[-1, -128]), ("model.norm.weight", "[-1, -128]")),
    Case("dtype another", entry(dtype="F32"), ("norm.weight", "512 bytes")),
    Case("dtype null", entry(dtype=None), ("model.norm.weight", "None")),
    Case("dtype unknown", entry(dtype="F12"), ("F12",)),
    Case("tensors overlap", entry(data_offsets=[2, 258]), ("overlaps",)),
    Case("a tensor absent", drop_tensor, (UP,)),
    Case("a tensor in two files", duplicate_tensor, ("in both", "model-2")),
    Case("shard missing", rename_shard, ("model-00002-of-00002", INDEX), FileNotFoundError),
    Case("index truncated", cut(INDEX, 0.5), (INDEX,)),
    Case("index without a map", write(INDEX, "{}"), (INDEX, "weight_map")),
    Case("index of numbers", write(INDEX, '{"weight_map": {"a": 1}}'), (INDEX, "'a'")),
    Case("index to another folder", index_of("../model.safetensors"), ("'../model",)),
    Case("index to another file", index_of("config.json"), (INDEX, "'config.json'")),
    Case("index to a name too long", index_of(f"model{'a' * 300}.safetensors"), ("missing",),
     FileNotFoundError),
    # The tokenizer
    Case("tokenizer missing", remove("tokenizer.json"), ("tokenizer.json",), FileNotFoundError),
    Case("tokenizer truncated", cut("tokenizer.json", 0.3), ("tokenizer.json",)),
    Case("tokenizer a list", write("tokenizer.json", "[]"), ("tokenizer.json",)),
    Case("tokenizer of an unknown kind", write("tokenizer.json", '{"model": {"type": "Magic"}}'),
     ("the tokenizer cannot be read",)),
    Case("tokenizer that merges a special token", merge_special,
     ("the tokenizer cannot be read", "PanicException")),
    Case("tokenizer_config.json not JSON", write("tokenizer_config.json", "{"),
     ("tokenizer_config.json",)),
]  # fmt: skip
