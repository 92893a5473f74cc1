"""Damaged models and senseless arguments: each is named in one line, and nothing is changed."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import CASES, UP, quantization
from damage import config as configured
from small_qwen import snapshot
from tiny_model import save_tiny_model

from mlx_qlayers import convert_model, load, revert_model
from mlx_qlayers.cli import main
from mlx_qlayers.conversion.loading import load_stock


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damaged_model(case, tiny_model, tmp_path):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    case.damage(path)
    with pytest.raises(case.error) as caught:
        load(path)
    message = str(caught.value)
    assert all(text in message for text in ("model", *case.says)), message
    assert str(path) in message or UP in message
    line = refused("generate", "--model", path, "--prompt", "x")
    assert all(text in line for text in case.says), line


def test_models_that_cannot_be_converted(tiny_model, plain_model):
    stock = load_stock(tiny_model).model
    before = snapshot(stock)
    group = {"group_size": 64, "bits": 4}
    for model, config, says in (
        (object(), None, "mlx.nn.Module, not object"),
        ([stock], None, "mlx.nn.Module, not list"),
        (load_stock(plain_model).model, None, "no quantized layer"),
        (stock, 7, "not 7"),
        (stock, {"quantization": {**group, "bits": 8}}, "bits=8"),
        (stock, {"quantization": {**group, UP: {"bits": 2}}}, UP),
        (stock, {"quantization": {**group, UP: False}}, UP),
        (stock, {"quantization": {**group, UP: [4]}}, "[4]"),
        (stock, {"quantization": {"bits": 4}}, "group_size is missing"),
        (stock, {"quantization": {**group, "group_size": 32}}, "group_size=32"),
        (stock, {"quantization": {**group, "group_size": 32, "mode": "mxfp4"}}, "mode='mxfp4'"),
        (stock, {"text_config": {"quantization": {**group, "bits": 9}}}, "text_config"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            convert_model(model, config=config)
        assert snapshot(stock) == before
    with pytest.raises(FileNotFoundError, match="no-config"):
        convert_model(stock, config=tiny_model / "no-config.json")


def test_the_pair_that_load_gives_is_one_line(tiny_model):
    pair = load_stock(tiny_model)[:2]
    for function in (convert_model, revert_model):
        with pytest.raises(TypeError, match=r"model, tokenizer = load\(path\)") as caught:
            function(pair)
        assert len(str(caught.value)) < 120 and "\n" not in str(caught.value)
    with pytest.raises(ValueError) as damaged:
        convert_model([pair[0]])
    assert len(str(damaged.value)) < 120


def test_keys_of_no_module_are_named_and_no_error(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    quantization(**{"model.layers.7.mlp.up_proj": {"group_size": 64, "bits": 8}})(path)
    loaded = load_stock(path)
    report = convert_model(loaded.model, config=loaded.quantization)
    assert report.unmatched == ("model.layers.7.mlp.up_proj",)
    assert "name no module: model.layers.7.mlp.up_proj" in str(report)


def test_an_architecture_that_exits(tiny_model, tmp_path):
    """As mlx-lm's file of olmo does where a package is missing."""
    path = shutil.copytree(tiny_model, tmp_path / "model")
    configured(model_type="olmo")(path)
    with pytest.raises(ValueError, match="mlx-lm builds no olmo"):
        load(path)


def test_a_model_without_quantized_layers(plain_model):
    with pytest.raises(ValueError, match="no quantized layer"):
        load(plain_model)
    for command in (["info"], ["generate", "--prompt", "x"]):
        line = refused(*command, "--model", plain_model)
        assert "no quantized layer" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--group-size", "48"], "group_size"),
        (["--bits", "9"], "bits"),
        (["--mode", "int4"], "'int4'"),
        (["--mode", "mxfp4", "--bits", "8"], "mxfp4"),
        (["--group-size", "128"], "multiple of 128"),  # wider than the layers
    ],
    ids=str,
)
def test_bad_conversion(arguments, says, narrow_model, tmp_path):
    line = refused("convert", "--hf-path", narrow_model, "--mlx-path", tmp_path / "out", *arguments)
    assert says in line
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def narrow_model(tmp_path_factory):
    """A checkpoint whose layers are 64 and 192 wide."""
    path = tmp_path_factory.mktemp("narrow") / "model"
    return save_tiny_model(path, quantized=False, hidden_size=64)


def refused(*arguments: object) -> str:
    """The message of a command, in one line, that ends with code 2."""
    with contextlib.redirect_stderr(io.StringIO()) as error:
        assert main([*map(str, arguments)]) == 2
    check_line(error.getvalue())
    return error.getvalue()


def check_line(text: str) -> None:
    assert text.endswith("\n") and text.count("\n") == 1, text
    assert text.startswith("mlx-qlayers")
    assert len(text) < 800


def test_repository_out_of_reach(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"nobody/nothing: no such directory.*HF_HUB_OFFLINE"
    ):
        load("nobody/nothing")
    for name in ("a/b/c", "/no/where", "./x", "-bad-", "a b"):
        with pytest.raises(FileNotFoundError, match=f"{name}: no such directory"):
            load(name)


def test_code_of_the_tokenizer_is_not_run(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    settings = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with contextlib.suppress(ValueError):
        load(path)
    assert not (tmp_path / "ran").exists()


@contextlib.contextmanager
def somebody_else() -> Iterator[None]:
    """Act without the privileges of root, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_unreadable(name, tiny_model):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "model"
        shutil.copytree(tiny_model, path)
        path.chmod(0o755)
        (path / name).chmod(0)
        with somebody_else():
            with pytest.raises(PermissionError, match=str(path)):
                load(path)
            line = refused("info", "--model", path)
        assert str(path) in line
        (path / name).chmod(0o755)


def test_target_is_taken(plain_model, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    for name, says in (("file", "not a directory"), ("full", "not empty")):
        line = refused("convert", "--hf-path", plain_model, "--mlx-path", tmp_path / name)
        assert str(tmp_path / name) in line and says in line
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes").read_text() == "mine"
    assert len(list(tmp_path.rglob("*"))) == 3


def test_quantized_already(tiny_model, tmp_path):
    line = refused("convert", "--hf-path", tiny_model, "--mlx-path", tmp_path / "out")
    assert "already quantized" in line


def test_no_room(monkeypatch, plain_model, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    line = refused("convert", "--hf-path", plain_model, "--mlx-path", tmp_path / "out")
    assert "0.1 MB are free" in line
    assert not any(tmp_path.iterdir())


_CONVERT_TWICE = """
import resource, sys
from mlx_qlayers.cli import main
for limit in (4_000, 60_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, 60_000))
    assert main(sys.argv[1:]) == 2
    sys.stderr.write("\\0")
"""


def test_disk_full(plain_model, tmp_path):
    """Writes that fail half-way, as on a full disk, here at a limit to the size of a file."""
    arguments = ["convert", "--hf-path", str(plain_model), "--mlx-path", str(tmp_path / "out")]
    command = [sys.executable, "-c", _CONVERT_TWICE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.split("\0")[:-1]
    assert len(said) == 2
    for line in said:
        check_line(line)
        assert "cannot be written" in line or "File too large" in line
    assert not any(tmp_path.iterdir())
