"""Loading with conversion: the stock model's words, the Hub's cache, and code that is not run."""

import io
import json
import shutil
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from gguf_files import save_qwen2
from mlx_lm.utils import quantize_model, save

from mlx_qlayers import QLinear, load
from mlx_qlayers.conversion.loading import find_model, load_stock

PROMPT = "One day he sent out a huntsman"


def test_converts_what_mlx_lm_loads(tmp_path):
    from tiny_model import save_tiny_model

    path = save_tiny_model(tmp_path / "model", dtype=mx.float32, seed=5)
    model, tokenizer = load(path)
    assert sum(isinstance(module, QLinear) for module in model.modules()) == 14
    stock, stock_tokenizer = mlx_lm.load(str(path))
    assert tokenizer.eos_token_ids == stock_tokenizer.eos_token_ids
    text = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=50)
    assert text == mlx_lm.generate(stock, stock_tokenizer, PROMPT, max_tokens=50)


@pytest.mark.parametrize(("group_size", "mode"), [(32, "mxfp4"), (32, "affine")])
def test_formats_mixed_as_mlx_lm_writes_them(group_size, mode, plain_model, tmp_path):
    model, tokenizer = mlx_lm.load(str(plain_model))
    config = json.loads((plain_model / "config.json").read_text())

    def predicate(path: str, module: object) -> dict[str, int] | bool:
        return {"bits": 8} if path.endswith("up_proj") else True  # in groups of 64, affine

    model, config = quantize_model(
        model, config, group_size, 4, mode=mode, quant_predicate=predicate
    )
    save(tmp_path, plain_model, model, tokenizer, config)
    converted, _ = load(tmp_path)
    up = converted.model.layers[0].mlp.up_proj
    assert isinstance(up, QLinear)
    assert (up.group_size, up.bits, up.mode) == (64, 8, "affine")


def test_keywords_reach_the_converter(tiny_model):
    model, _ = load(tiny_model, linear=False, attention=False, lazy=True)
    stock, _, config, quantization = load_stock(tiny_model)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert config["quantization"]["bits"] == quantization.default.bits == 4
    with pytest.raises(TypeError):
        load(tiny_model, bits=4)  # type: ignore[call-arg]


def test_model_config_replaces_values(tiny_model):
    model, _ = load(tiny_model, model_config={"rope_theta": 500.0})
    assert model.args.rope_theta == 500.0


def test_downloads_through_the_hub(tiny_model, tmp_path, monkeypatch):
    asked = []

    def download(repo: str, **options: Any) -> str:
        asked.append((repo, options))
        return str(tiny_model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    load("owner/name", revision="v1")
    find_model("owner/name", trust_remote_code=True)
    assert [repo for repo, _ in asked] == ["owner/name"] * 2
    assert asked[0][1]["revision"] == "v1"
    patterns = [options["allow_patterns"] for _, options in asked]
    assert "*.py" not in patterns[0] and "*.py" in patterns[1]

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for file in (io.StringIO(), Terminal()):
        asked[0][1]["tqdm_class"](total=3, desc="Fetching", file=file).close()
        assert ("Fetching" in file.getvalue()) == file.isatty()


def test_a_gguf_file_of_a_repository(tmp_path, monkeypatch):
    """It alone is downloaded."""
    save_qwen2(tmp_path / "model-q4_0.gguf")
    asked = []

    def download(repo: str, **options: Any) -> str:
        asked.append((repo, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model, _ = load("owner/name-GGUF/model-q4_0.gguf")
    assert model.layers and asked == [("owner/name-GGUF", ["model-q4_0.gguf"])]
    with pytest.raises(FileNotFoundError, match=r"other\.gguf"):
        load("owner/name-GGUF/other.gguf")
    for name in ("/nowhere/a/b.gguf", "./a/b.gguf"):
        with pytest.raises(FileNotFoundError, match="no such"):
            find_model(name)


def test_offline_takes_the_cache(tiny_model, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--name"
    shutil.copytree(tiny_model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    try:
        path = find_model("owner/name")
    except FileNotFoundError as error:  # a hub that also wants the list of the repository's files
        pytest.fail(str(error))
    assert path == repository / "snapshots" / commit
    load("owner/name")


def test_runs_code_only_when_told(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"model_file": "own.py"}
    (path / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w')\nfrom mlx_lm.models.qwen2 import Model, ModelArgs\n"
    (path / "own.py").write_text(code)
    with pytest.raises(ValueError, match=r"own\.py"):
        load(path)
    assert not mark.exists()
    load(path, trust_remote_code=True)
    assert mark.exists()
