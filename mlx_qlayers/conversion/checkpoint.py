"""A model directory checked before it is read, so that damage is named where it is.

The headers of the safetensors files are read and no weight is: a check of a large model takes
milliseconds. The format is that of https://github.com/huggingface/safetensors#format. MLX
checks the rest, such as sizes and the end of the file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..runtime.versions import version_of

INDEX = "model.safetensors.index.json"
_WEIGHTS = "model*.safetensors"  # the files that mlx-lm reads
# The files that mlx-lm downloads, but for Python's.
PATTERNS = ("*.json", _WEIGHTS, "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "*.jsonl")
_SIZES = "hidden_size|num_hidden_layers|num_attention_heads|vocab_size"
_BLOCKS, _BLOCK = 64, 4096  # of which digests are made
_HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors library


def check_directory(path: Path) -> dict[str, Any]:
    """Check that ``path`` holds a whole mlx-lm model and return its ``config.json``.

    That is ``config.json``, ``model*.safetensors`` and a tokenizer. A ``FileNotFoundError``,
    ``NotADirectoryError`` or ``ValueError`` names the file, the key and the value that is wrong.

    Example:
        >>> check_directory(Path("models/tales-qwen2"))["model_type"]
        'qwen2'
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such directory")
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: a model is a directory, and this is a file")
    if not any(path.iterdir()):
        raise FileNotFoundError(f"{path}: the directory is empty")
    for file in path.iterdir():  # of which mlx-lm and the tokenizer read more than is read here
        if file.exists() and any(map(file.match, PATTERNS)):
            _check_kind(file)
    config = _check_config(path / "config.json")
    tensors = _check_weights(path)
    for key, count in _fields(config, r"(num|n)_(\w+_)?layers?"):
        if type(count) is int and count > tensors:  # to build them would take for ever
            raise ValueError(
                f"{path / 'config.json'}: {key!r} is {count}, and the weights are {tensors} "
                "tensors, less than one a layer"
            )
    _check_tokenizer(path)
    return config


def digests(path: Path) -> dict[str, str]:
    """Digests of a directory or a checked GGUF file by headers and blocks of 4 KB, and versions."""
    weights, files = sha256(), [path] if path.is_file() else sorted(path.glob(_WEIGHTS))
    for file in files:
        size = file.stat().st_size
        weights.update(f"{file.name if path.is_dir() else ''} {size}".encode())
        with file.open("rb") as data:
            header = 0 if file.suffix == ".gguf" else 8 + int.from_bytes(data.read(8), "little")
            starts = {header + (size - header) * i // _BLOCKS for i in range(_BLOCKS)}
            for start, length in ((0, header), *((at, _BLOCK) for at in sorted(starts))):
                data.seek(start)
                weights.update(data.read(length))
    found = {"weights": weights.hexdigest()[:16]}
    if path.is_dir():
        config = json.dumps(read_json(path / "config.json"), sort_keys=True)
        found["config.json"] = sha256(config.encode()).hexdigest()[:16]
    return found | {name: version_of(name) for name in ("mlx", "mlx-lm", "mlx-qlayers")}


def check_adapter(path: Path) -> None:
    """Check the files of an adapter, and its rank, which mlx-lm would allocate unseen.

    A ``FileNotFoundError`` or ``ValueError`` names the file, and what is damaged or contradicts it.
    """
    file = path / "adapter_config.json"
    config, header = read_object(file, "configuration"), read_header(path / "adapters.safetensors")
    if config.get("fine_tune_type") == "full":
        return
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise ValueError(f"{file}: 'lora_parameters' must be an object, not {parameters!r}")
    scale, rank = (parameters.get(key) for key in ("scale", "rank"))
    # Whole numbers become int64 first.
    most = 2**63 - 1 if isinstance(scale, int) else mx.finfo(mx.float32).max
    if not isinstance(scale, int | float) or not abs(scale) <= most:
        raise ValueError(f"{file}: 'scale' must be a number that MLX holds, not {scale!r}")
    shapes = [entry["shape"] for name, entry in header.items() if name.endswith(".lora_a")]
    ranks = {size for shape in shapes for size in shape[1:2]}
    if [*ranks] != [rank]:
        held = ", ".join(map(str, sorted(ranks))) or "none"
        raise ValueError(f"{file}: 'rank' is {rank!r}, and that of its 'lora_a' arrays is {held}")


def read_json(path: Path) -> Any:
    """The value in a JSON file; its errors name the file."""
    _check_kind(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON, or cut short: {error}") from error


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a safetensors file by tensor name, each checked against the file.

    A ``FileNotFoundError`` or ``ValueError`` names the file: it is not there, cut short, or its
    header contradicts itself or the file's size.
    """
    _check_kind(path)
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
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise ValueError(f"{path}: the header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is {_kind(header)}, not an object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        match entry:
            case {"dtype": str(), "shape": [*shape], "data_offsets": [int(), int()]} if all(
                type(n) is int and 0 <= n < 2**31 for n in shape
            ):
                continue
        raise ValueError(
            f"{path}: tensor {name!r} needs a dtype, a shape and two data_offsets, not {entry!r}"
        )
    try:
        mx.load(str(path))
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error
    end, before = 0, ""
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if begin < min(end, stop):  # an empty tensor overlaps nothing
            raise ValueError(
                f"{path}: tensor {name!r} overlaps {before!r}: it begins at {begin} before {end}"
            )
        if begin < stop:
            end, before = stop, name
    return header


def _check_kind(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():  # a pipe would be waited for, and a device read for ever
        kind = "a directory" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path}: must be a file, and is {kind}")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file, which holds ``what``; errors name the file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: the {what} is {_kind(value)}, not an object")
    return value


def _check_config(path: Path) -> dict[str, Any]:
    config = read_object(path, "configuration")
    if "model_type" not in config:
        raise ValueError(f"{path}: the key 'model_type' is missing")
    model_type = config["model_type"]
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"{path}: 'model_type' must be a name, not {model_type!r}")
    for key, size in _fields(config, _SIZES):
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{path}: {key!r} must be a whole number of at least 1, not {size!r}")
    sizes = dict(_fields(config, "hidden_size|num_attention_heads"))
    for prefix in ("", "text_config."):
        width, heads = (sizes.get(prefix + key) for key in ("hidden_size", "num_attention_heads"))
        if width is not None and heads is not None and width < heads:
            raise ValueError(
                f"{path}: '{prefix}num_attention_heads' {heads} is more than "
                f"'{prefix}hidden_size' {width}"
            )
    for key, base in _fields(config, "rope_theta"):
        if base is not None and not (isinstance(base, int | float) and base > 0):
            raise ValueError(f"{path}: {key!r} must be a number above 0, not {base!r}")
    for key, window in _fields(config, "sliding_window"):
        if window is not None and type(window) is not int:
            raise ValueError(f"{path}: {key!r} must be a whole number or null, not {window!r}")
    return config


def _fields(config: dict[str, Any], pattern: str) -> Iterator[tuple[str, Any]]:
    """The fields of such a name, of the model and of the language model inside it."""
    for prefix, level in (("", config), ("text_config.", config.get("text_config"))):
        for key, value in level.items() if isinstance(level, dict) else ():
            if re.fullmatch(pattern, key):
                yield prefix + key, value


def _check_weights(path: Path) -> int:
    """Check all files of weights, and count the tensors."""
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
        if others and others[0].endswith(".gguf"):
            hint = f"; it holds {others[0]}, which is loaded by its own path"
        raise FileNotFoundError(f"{path}: no {_WEIGHTS} in this directory{hint}")
    return len(owner)


def _check_index(path: Path, owner: dict[str, str]) -> None:
    index = read_json(path)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"{path}: the key 'weight_map' must be an object, not {_kind(names)}")
    for name, file in names.items():
        if not isinstance(file, str):
            raise ValueError(f"{path}: the file of {name!r} must be a name, not {file!r}")
        # An index left over beside merged weights does no harm: only an absent tensor does.
        if name in owner:
            continue
        if "/" in file or not (file.isprintable() and fnmatchcase(file, _WEIGHTS)):
            raise ValueError(
                f"{path}: the file of {name!r} must be a {_WEIGHTS} beside it, not {file!r}"
            )
        if len(file) > 255 or not (path.parent / file).exists():
            raise FileNotFoundError(f"{path.parent / file}: missing, and {path.name} names it")


def _check_tokenizer(path: Path) -> None:
    if not any(file for pattern in _TOKENIZERS for file in path.glob(pattern)):
        raise FileNotFoundError(
            f"{path / 'tokenizer.json'}: missing, and so is any other tokenizer"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (path / name).exists():
            read_object(path / name, "tokenizer")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} appears twice")
    return entries


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
