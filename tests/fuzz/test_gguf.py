"""GGUF files that were damaged or made up."""

import contextlib
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_qlayers.conversion.gguf_file import read_header
from mlx_qlayers.conversion.loading import load_stock
from tests.conversion.test_gguf import FAMILIES, written
from tests.fuzz.documents import Damage, damaged, spoilt_bytes, spoilt_document
from tests.fuzz.target import fuzz
from tests.gguf_files import KINDS, write


@cache
def _sound(architecture: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return written(Path(folder) / "model.gguf", architecture, "Q4_0")[1]


def _write(path: Path, case: Damage) -> None:
    """Write the file; its parts stay where the format can say what the edits made of them."""
    sound = _sound(case.name)
    told = {
        "metadata": sound["metadata"],
        "tensors": {
            name: [kind, list(shape)] for name, (kind, shape, _) in sound["tensors"].items()
        },
    }
    told = spoilt_document(told, case.edits)
    tensors = told.get("tensors") if isinstance(told, dict) else None
    found = {}
    for name, entry in (tensors if isinstance(tensors, dict) else {}).items():
        data = sound["tensors"].get(name, ("", (), b"12345678"))[2]
        kind, shape = entry if isinstance(entry, list) and len(entry) == 2 else ("", None)
        if isinstance(shape, list) and kind in list(KINDS):
            found[name] = (kind, tuple(shape), data)
    metadata = told.get("metadata") if isinstance(told, dict) else None
    with contextlib.suppress(struct.error, TypeError, UnicodeError, OverflowError):
        write(path, metadata if isinstance(metadata, dict) else {}, found)
    data = path.read_bytes() if path.exists() else b""
    path.write_bytes(spoilt_bytes(data, case.cuts))


@fuzz(damaged(*sorted(FAMILIES)), examples=15)
def test_gguf(case: Damage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        _write(path, case)
        try:
            read_header(path)
            loaded = load_stock(path)
        except (ValueError, FileNotFoundError):
            return
        with contextlib.suppress(Exception):  # what an odd model computes is mlx-lm's
            mx.eval(loaded.model(mx.array([[1, 2, 3]])))
