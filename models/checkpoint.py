"""Checkpoints that are either whole or absent, wherever a run is interrupted."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten


def save(path: Path, arrays: dict[str, Any], progress: dict[str, Any]) -> None:
    """Write a tree of arrays and a JSON value to one safetensors file, atomically."""
    partial = path.with_name("partial-" + path.name)
    flat = {k: v for k, v in tree_flatten(arrays) if v.size}
    mx.save_safetensors(str(partial), flat, metadata={"progress": json.dumps(progress)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what `save` wrote."""
    flat, metadata = mx.load(str(path), return_metadata=True)
    mx.eval(flat)
    return tree_unflatten(list(flat.items())), json.loads(metadata["progress"])
