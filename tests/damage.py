"""Ways to spoil a model directory, and what must be said about each."""

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
    error: type[Exception]
    says: tuple[str, ...]

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


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Rewrite the header of model.safetensors and keep its data."""

    def damage(path: Path) -> None:
        file = path / "model.safetensors"
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8:end])
        text = json.dumps(change(entries) or entries).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

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
    file = path / "model.safetensors"
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    entry_text = json.dumps({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})[1:-1]
    text = f"{{{entry_text}, {entry_text}}}".encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


def header_of(path: Path, text: str) -> None:
    data = text.encode()
    (path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)


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
