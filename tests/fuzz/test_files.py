"""Files that were damaged or made up: models, adapters, tuning results."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category

import mlx.core as mx
from command_line import outcome
from hypothesis import strategies as st

from mlx_qlayers.conversion.checkpoint import check_directory
from mlx_qlayers.conversion.config import QuantizationConfig
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.measurements import entries, store
from mlx_qlayers.measurements.entries import Entry
from tests.fuzz.documents import CUTS, EDITS, Cut, Damage, Edit, damaged, spoilt_document
from tests.fuzz.target import fuzz
from tests.tiny_model import save_tiny_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@cache
def _home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "plain", quantized=False)
    return folder


@contextlib.contextmanager
def changed(name: str, change: Callable[[bytes], bytes]) -> Iterator[Path]:
    """A copy of the small model in which one file is another."""
    with tempfile.TemporaryDirectory(dir=_home()) as folder:
        path = Path(folder) / "m"
        path.mkdir()
        for file in (_home() / "model").iterdir():
            if file.name == name:
                (path / name).write_bytes(change(file.read_bytes()))
            else:
                os.link(file, path / file.name)
        yield path


def _check_terminal(text: str, what: str) -> None:
    odd = [c for c in text if category(c) == "Cc" and c not in "\n\t\r"]
    assert not odd, f"{what} prints {odd[:5]}"


CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "generation_config.json",
    INDEX,
)


@fuzz(damaged("config.json", "config.json", *CONFIGS), examples=8, seconds=4)
def test_model_documents(case: Damage) -> None:
    with changed(case.name, case.of_json) as path:
        code, out, error = outcome("info", "--model", str(path))
        assert code in (0, 2)
        _check_terminal(out, "info")
        _check_terminal(error, "info")
        if code == 2:
            assert error.startswith("mlx-qlayers") and error.count("\n") == 1, error
            return
        # The results and errors of an odd model are mlx-lm's; nothing ends the process.
        with contextlib.suppress(Exception):
            mx.eval(load_stock(path).model(mx.array([[1, 2, 3]])))


# Most of the bytes are weights; what matters stands at the beginning.
_HEAD = st.builds(
    Cut, st.floats(0, 0.03), st.sampled_from([0, 1, 8, 30]), st.binary(max_size=6)
).map(lambda cut: (cut,))


@fuzz(damaged(WEIGHTS, cuts=_HEAD | CUTS), examples=20)
def test_weights(case: Damage) -> None:
    with changed(WEIGHTS, case.of_weights) as path:
        try:
            check_directory(path)
        except (ValueError, FileNotFoundError):
            return
        with contextlib.suppress(ValueError, FileNotFoundError):
            mx.eval(load_stock(path).model.parameters())


_ADAPTER = {
    "fine_tune_type": "lora",
    "num_layers": 2,
    "lora_parameters": {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
}


@cache
def _adapters() -> Path:
    """Sound adapters of the small model."""
    folder = _home() / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(_ADAPTER))
    arrays = {
        f"model.layers.{i}.self_attn.q_proj.lora_{name}": mx.zeros(shape)
        for i in range(2)
        for name, shape in (("a", (128, 4)), ("b", (4, 128)))
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    return folder


@fuzz(damaged("adapter_config.json", "adapters.safetensors"), examples=6, seconds=3)
def test_adapters(case: Damage) -> None:
    change = case.of_json if case.name == "adapter_config.json" else case.of_weights
    with tempfile.TemporaryDirectory(dir=_home()) as folder:
        path = Path(folder) / "adapters"
        shutil.copytree(_adapters(), path)
        (path / case.name).write_bytes(change((path / case.name).read_bytes()))
        try:
            loaded = load_stock(_home() / "model", adapter_path=str(path))
        except (ValueError, FileNotFoundError):
            return
        mx.eval(loaded.model(mx.array([[1, 2, 3]])))


_CONFIG = {
    "model_type": "qwen2",
    "quantization": {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8},
        "lm_head": False,
    },
    "text_config": {"quantization_config": {"group_size": 64, "bits": 4}},
}


@fuzz(EDITS, examples=100)
def test_quantization_entries(case: tuple[Edit, ...]) -> None:
    document = spoilt_document(_CONFIG, case)
    with contextlib.suppress(ValueError):
        config = QuantizationConfig.read(document)
        for path in ("model.layers.0.mlp.up_proj", "lm_head", "x"):
            config.entry(path)


def _entry(path: str) -> dict[str, Any]:
    config = {"simds": 2, "outputs": 4, "unroll": 1}
    return {
        "config": config,
        "path": path,
        "seconds": 1e-5,
        "heuristic": 2e-5,
        "tried": 3,
        "source": "0123",
        "mlx": "0.32.4",
        "paths": {"kernel": 1e-5, "stock": 2e-5},
    }


_RESULTS = {
    "device": "cpu",
    "entries": {
        "qmv 1x64x64 float16 affine-64-4-t": _entry("kernel"),
        "qmm 32x64x64 float16 affine-64-4-t": _entry("stock"),
        "grid_sample_gain": {"values": {"bilinear": 1.8, "nearest": 2}, "note": "mine"},
        "of another version": {"x": [1, {"y": None}]},
    },
}


@fuzz(damaged("cpu.json"), examples=60)
def test_tuning_results(case: Damage) -> None:
    data = case.of_json(json.dumps(_RESULTS).encode())
    new = Entry({"a": 1}, "kernel", 1.0, 1.0, 1, "", "0.32.4")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / case.name
        file.write_bytes(data)
        found = entries.read(folder, "cpu")
        assert store.save("cpu", {"new": new}, folder)
        kept = json.loads(file.read_text())["entries"]
        assert kept.pop("new")["config"] == {"a": 1}
        aside = [p for p in folder.iterdir() if "damaged" in p.name]
        if aside:
            assert aside[0].read_bytes() == data and not found
            return
        before = dict(json.loads(data)["entries"])
        before.pop("new", None)
        assert json.dumps(kept, sort_keys=True) == json.dumps(before, sort_keys=True)
        assert entries.read(folder, "cpu").keys() == found.keys() | {"new"}
