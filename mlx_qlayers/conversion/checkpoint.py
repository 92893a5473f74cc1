"""A model directory checked before it is read, so that damage is named where it is.

The headers of the safetensors files are read and no weight is: a check of a large model takes
milliseconds. The format is that of https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypeGuard

INDEX = "model.safetensors.index.json"
_WEIGHTS = "model*.safetensors"  # the files that mlx-lm reads
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "*.jsonl")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors library
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def check_directory(path: Path) -> dict[str, Any]:
    """Check that ``path`` holds a whole mlx-lm model and return its ``config.json``.

    Args:
        path: a directory with ``config.json``, ``model*.safetensors`` and a tokenizer.

    Returns:
        The configuration.

    Raises:
        FileNotFoundError: ``path`` or one of the files that it needs does not exist.
        NotADirectoryError: ``path`` is something else than a directory.
        ValueError: a file is damaged. The message names the file, the key and the value.

    Example:
        >>> check_directory(Path("models/tales-qwen2"))["model_type"]
        'qwen2'
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path}: no such directory")
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: a model is a directory, and this is a file")
    if not any(path.iterdir()):
        raise FileNotFoundError(f"{path}: the directory is empty")
    config = _check_config(path / "config.json")
    _check_weights(path)
    _check_tokenizer(path)
    return config


def read_json(path: Path) -> Any:
    """The value in a JSON file; its errors name the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON, or cut short: {error}") from error


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a safetensors file by tensor name, after checking each against the file.

    Raises:
        ValueError: the file is cut short, or its header contradicts itself or the file's size.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(
                f"{path}: cut short or not safetensors: a header of {length} bytes is announced, "
                f"and the file has {size} bytes"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:  # JSON and UTF-8 errors are ValueErrors
        raise ValueError(f"{path}: the header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is {_kind(header)}, not an object")
    header.pop("__metadata__", None)
    _check_entries(path, header, size - 8 - length)
    return header


def _check_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: the configuration is {_kind(config)}, not an object")
    if "model_type" not in config:
        raise ValueError(f"{path}: the key 'model_type' is missing")
    model_type = config["model_type"]
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"{path}: 'model_type' must be a name, not {model_type!r}")
    for key in _SIZES:
        size = config.get(key)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{path}: {key!r} must be a whole number of at least 1, not {size!r}")
    return config


def _check_weights(path: Path) -> None:
    files = sorted(path.glob(_WEIGHTS))
    owner: dict[str, str] = {}
    for file in files:
        for name in read_header(file):
            if name in owner:
                raise ValueError(f"{path}: {name!r} is in both {owner[name]} and {file.name}")
            owner[name] = file.name
    if (path / INDEX).exists():
        _check_index(path / INDEX, owner)
    if not files:
        others = sorted(p.name for p in path.iterdir() if p.suffix in {".bin", ".gguf", ".npz"})
        hint = f"; it holds {others[0]}, which mlx-lm does not read" if others else ""
        raise FileNotFoundError(f"{path}: no {_WEIGHTS} in this directory{hint}")


def _check_index(path: Path, owner: dict[str, str]) -> None:
    index = read_json(path)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"{path}: the key 'weight_map' must be an object, not {_kind(names)}")
    for name, file in names.items():
        if not isinstance(file, str):
            raise ValueError(f"{path}: the file of {name!r} must be a name, not {file!r}")
        # An index left over beside merged weights does no harm: only an absent tensor does.
        if name not in owner and not (path.parent / file).exists():
            raise FileNotFoundError(f"{path.parent / file}: missing, and {path.name} names it")


def _check_tokenizer(path: Path) -> None:
    if not any(file for pattern in _TOKENIZERS for file in path.glob(pattern)):
        raise FileNotFoundError(
            f"{path / 'tokenizer.json'}: missing, and so is any other tokenizer"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).exists() and not isinstance(value := read_json(path / name), dict):
            raise ValueError(f"{path / name}: the tokenizer is {_kind(value)}, not an object")


def _check_entries(path: Path, header: dict[str, Any], size: int) -> None:
    end, before = 0, ""
    for name, entry in sorted(header.items(), key=lambda item: _begin(item[1])):
        where = f"{path}: tensor {name!r}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is described by {_kind(entry)}, not an object")
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str):
            raise ValueError(f"{where}: 'dtype' must be a name, not {dtype!r}")
        if not _naturals(shape):
            raise ValueError(f"{where}: 'shape' must be a list of sizes, not {shape!r}")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ValueError(f"{where}: 'data_offsets' must be a begin and an end, not {offsets!r}")
        if offsets[1] > size:
            raise ValueError(
                f"{where} ends at byte {offsets[1]} of {size}: the file is cut short "
                "(an incomplete download?) or its header is wrong"
            )
        wanted = math.prod(shape) * _BITS.get(dtype, 0) // 8
        if dtype in _BITS and wanted != offsets[1] - offsets[0]:
            raise ValueError(
                f"{where}: {dtype} of shape {shape} takes {wanted} bytes, "
                f"and 'data_offsets' {offsets} span {offsets[1] - offsets[0]}"
            )
        if offsets[0] < end:
            raise ValueError(f"{where} overlaps {before!r}: it begins at {offsets[0]} before {end}")
        end, before = offsets[1], name


def _begin(entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return offsets[0] if _naturals(offsets) and offsets else -1


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return entries


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
