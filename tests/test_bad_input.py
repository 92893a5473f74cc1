"""Damaged models and senseless arguments: each is named in one line, and nothing is changed.

Run as a script, this prints the table of ``BAD_INPUT.md``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from mlx_qlayers import convert_model, load
from mlx_qlayers.cli import main
from mlx_qlayers.loading import load_stock

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
    Case("path does not exist", shutil.rmtree, FileNotFoundError, ("no such directory",)),
    Case("a file, not a directory", to_file, NotADirectoryError, ("model is a directory",)),
    Case("empty directory", empty, FileNotFoundError, ("the directory is empty",)),
    # config.json
    Case("config.json missing", remove("config.json"), FileNotFoundError, ("config.json",)),
    Case("config.json truncated", cut("config.json", 0.5), ValueError, ("config.json", "JSON")),
    Case("config.json empty", write("config.json", ""), ValueError, ("config.json", "empty")),
    Case("config.json not JSON", write("config.json", "a: 1"), ValueError, ("config.json", "JSON")),
    Case(
        "config.json not text",
        write("config.json", b"\xff\xfe\x00{"),
        ValueError,
        ("config.json", "UTF-8"),
    ),
    Case("config.json a list", write("config.json", "[1]"), ValueError, ("config.json", "a list")),
    Case("model_type missing", config(model_type=...), ValueError, ("config.json", "model_type")),
    Case("model_type a number", config(model_type=3), ValueError, ("model_type", "3")),
    Case("model_type unknown", config(model_type="qwen99"), ValueError, ("qwen99",)),
    Case("hidden_size missing", config(hidden_size=...), ValueError, ("hidden_size",)),
    Case("hidden_size a string", config(hidden_size="wide"), ValueError, ("hidden_size", "'wide'")),
    Case("vocab_size negative", config(vocab_size=-4), ValueError, ("vocab_size", "-4")),
    Case("num_hidden_layers 2.5", config(num_hidden_layers=2.5), ValueError, ("layers", "2.5")),
    Case(
        "rope_scaling unknown",
        config(rope_scaling={"type": "magic", "factor": 2.0}),
        ValueError,
        ("mlx-lm builds no qwen2", "magic"),
    ),
    Case("more layers than weights", config(num_hidden_layers=3), ValueError, ("model.layers.2",)),
    Case("other width than the weights", config(hidden_size=256), ValueError, ("shape",)),
    Case(
        "code of its own",
        config(model_file="model.py"),
        ValueError,
        ("config.json", "model_file", "model.py", "trust_remote_code"),
    ),
    # quantization
    Case("group_size 48", quantization(group_size=48), ValueError, ("group_size", "48")),
    Case("bits 9", quantization(bits=9), ValueError, ("bits", "9")),
    Case("mode unknown", quantization(mode="int4"), ValueError, ("mode", "int4")),
    Case("bits a string", quantization(bits="4"), ValueError, ("bits", "'4'")),
    Case("bits true", quantization(bits=True), ValueError, ("bits", "True")),
    Case("group_size missing", quantization(group_size=...), ValueError, ("group_size",)),
    Case(
        "quantization a string",
        config(quantization="4bit", quantization_config="4bit"),
        ValueError,
        ("quantization", "4bit"),
    ),
    Case("bits contradict the arrays", quantization(bits=8), ValueError, ("bits", "8", "4")),
    Case(
        "group_size contradicts the arrays",
        quantization(group_size=32),
        ValueError,
        ("group_size", "32", "64"),
    ),
    Case(
        "bits of one layer contradict",
        quantization(**{UP: {"group_size": 64, "bits": 8}}),
        ValueError,
        (UP, "bits", "8", "4"),
    ),
    Case(
        "a packed layer said not to be", quantization(**{UP: False}), ValueError, (UP, "not quant")
    ),
    Case("mode contradicts", quantization(mode="mxfp4", group_size=32), ValueError, ("mxfp4",)),
    Case(
        "width of a group does not divide",
        quantization(lm={"group_size": 100}),
        ValueError,
        ("lm.group_size", "100"),
    ),
    Case("layer entry a number", quantization(**{UP: 4}), ValueError, (UP, "4")),
    # model.safetensors
    Case(
        "weights missing", remove("model.safetensors", INDEX), FileNotFoundError, (".safetensors",)
    ),
    Case("weights of torch", only_torch, FileNotFoundError, ("pytorch_model.bin",)),
    Case("weights truncated", cut("model.safetensors", 0.6), ValueError, ("cut short",)),
    Case("header truncated", cut("model.safetensors", 0.001), ValueError, ("cut short",)),
    Case("weights empty", write("model.safetensors", ""), ValueError, ("0 bytes",)),
    Case(
        "header length of 2**60",
        write("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        ValueError,
        (str(1 << 60),),
    ),
    Case(
        "header not JSON",
        write("model.safetensors", (8).to_bytes(8, "little") + b"{'a': 1}"),
        ValueError,
        ("header cannot be read",),
    ),
    Case("header a list", header(lambda _: [1]), ValueError, ("header is a list",)),
    Case("header repeats a tensor", repeat_key, ValueError, ("'x' appears twice",)),
    Case(
        "offsets beyond the file",
        entry(data_offsets=[0, 1 << 40]),
        ValueError,
        ("model.norm.weight", str(1 << 40)),
    ),
    Case("offsets reversed", entry(data_offsets=[8, 0]), ValueError, ("data_offsets", "[8, 0]")),
    Case("offsets of text", entry(data_offsets="0-8"), ValueError, ("data_offsets", "0-8")),
    Case("shape too large", entry(shape=[1000]), ValueError, ("model.norm.weight", "[1000]")),
    Case("shape negative", entry(shape=[-1, -128]), ValueError, ("shape", "[-1, -128]")),
    Case("dtype another", entry(dtype="F32"), ValueError, ("F32", "512 bytes")),
    Case("dtype null", entry(dtype=None), ValueError, ("dtype", "None")),
    Case("dtype unknown", entry(dtype="F12"), ValueError, ("F12",)),
    Case("tensors overlap", entry(data_offsets=[2, 258]), ValueError, ("overlaps",)),
    Case("a tensor absent", drop_tensor, ValueError, (UP,)),
    Case("a tensor in two files", duplicate_tensor, ValueError, ("in both", "model-2")),
    Case("shard missing", rename_shard, FileNotFoundError, ("model-00002-of-00002", INDEX)),
    Case("index truncated", cut(INDEX, 0.5), ValueError, (INDEX,)),
    Case("index without a map", write(INDEX, "{}"), ValueError, (INDEX, "weight_map")),
    Case("index of numbers", write(INDEX, '{"weight_map": {"a": 1}}'), ValueError, (INDEX, "'a'")),
    # The tokenizer
    Case("tokenizer missing", remove("tokenizer.json"), FileNotFoundError, ("tokenizer.json",)),
    Case("tokenizer truncated", cut("tokenizer.json", 0.3), ValueError, ("tokenizer.json",)),
    Case("tokenizer a list", write("tokenizer.json", "[]"), ValueError, ("tokenizer.json",)),
    Case(
        "tokenizer of an unknown kind",
        write("tokenizer.json", '{"model": {"type": "Magic"}}'),
        ValueError,
        ("the tokenizer cannot be read",),
    ),
    Case(
        "tokenizer_config.json not JSON",
        write("tokenizer_config.json", "{"),
        ValueError,
        ("tokenizer_config.json",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damaged_model(case: Case, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    case.damage(path)
    with pytest.raises(case.error) as caught:
        load(path)
    message = str(caught.value)
    assert all(text in message for text in ("model", *case.says)), message
    assert str(path) in message or UP in message
    code, line = run_cli("generate", "--model", str(path), "--prompt", "x")
    assert code == 2
    check_line(line)
    assert all(text in line for text in case.says), line


def test_models_that_cannot_be_converted(tiny_model: Path, plain_model: Path) -> None:
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
        (stock, {"text_config": {"quantization": {**group, "bits": 9}}}, "text_config"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            convert_model(model, config=config)
        assert snapshot(stock) == before
    with pytest.raises(FileNotFoundError, match="no-config"):
        convert_model(stock, config=tiny_model / "no-config.json")


def snapshot(model: nn.Module) -> list[tuple[str, type, dict[str, int]]]:
    """Each module's type, and which arrays it holds."""
    return [
        (path, type(module), {key: id(value) for key, value in module.items()})
        for path, module in model.named_modules()
    ]


def test_keys_of_no_module_are_named_and_no_error(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    quantization(**{"model.layers.7.mlp.up_proj": {"group_size": 64, "bits": 8}})(path)
    loaded = load_stock(path)
    report = convert_model(loaded.model, config=loaded.quantization)
    assert report.unmatched == ("model.layers.7.mlp.up_proj",)
    assert "name no module: model.layers.7.mlp.up_proj" in str(report)


def test_a_model_without_quantized_layers(plain_model: Path) -> None:
    with pytest.raises(ValueError, match="no quantized layer"):
        load(plain_model)
    for command in (["info"], ["generate", "--prompt", "x"]):
        code, line = run_cli(*command, "--model", str(plain_model))
        assert code == 2
        check_line(line)
        assert "no quantized layer" in line


ARGUMENTS = [
    ("prompt of no tokens", ["--prompt", ""], "prompt ''"),
    ("max-tokens 0", ["--prompt", "x", "--max-tokens", "0"], "at least 1, not 0"),
    ("max-tokens negative", ["--prompt", "x", "--max-tokens", "-5"], "at least 1, not -5"),
    ("max-tokens a word", ["--prompt", "x", "--max-tokens", "ten"], "'ten'"),
    ("temp negative", ["--prompt", "x", "--temp", "-0.1"], "-0.1"),
    ("temp NaN", ["--prompt", "x", "--temp", "nan"], "nan"),
    ("temp infinite", ["--prompt", "x", "--temp", "inf"], "inf"),
    ("prompt missing", [], "--prompt"),
    ("argument unknown", ["--prompt", "x", "--tokens", "3"], "--tokens"),
]


@pytest.mark.parametrize(("name", "arguments", "says"), ARGUMENTS, ids=[a[0] for a in ARGUMENTS])
def test_bad_arguments(name: str, arguments: list[str], says: str, tiny_model: Path) -> None:
    code, line = run_cli("generate", "--model", str(tiny_model), *arguments)
    assert code == 2, name
    check_line(line)
    assert says in line


CONVERSIONS = [
    ("convert to group size 48", ["--group-size", "48"], "group_size"),
    ("convert to 9 bits", ["--bits", "9"], "bits"),
    ("convert to an unknown mode", ["--mode", "int4"], "'int4'"),
    ("convert to mxfp4 of 8 bits", ["--mode", "mxfp4", "--bits", "8"], "mxfp4"),
    ("convert to groups wider than the layers", ["--group-size", "128"], "multiple of 128"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "says"), CONVERSIONS, ids=[c[0] for c in CONVERSIONS]
)
def test_bad_conversion(
    name: str, arguments: list[str], says: str, narrow_model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    code, line = run_cli(
        "convert", "--hf-path", str(narrow_model), "--mlx-path", str(target), *arguments
    )
    assert code == 2, name
    check_line(line)
    assert says in line
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def narrow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layers are 64 and 192 wide."""
    from tiny_model import save_tiny_model

    path = tmp_path_factory.mktemp("narrow") / "model"
    return save_tiny_model(path, quantized=False, hidden_size=64)


def run_cli(*arguments: str) -> tuple[int, str]:
    """The exit code and what was printed to standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(arguments)
    return code, error.getvalue()


def check_line(text: str) -> None:
    assert text.endswith("\n") and text.count("\n") == 1, text
    assert text.startswith("mlx-qlayers")
    assert len(text) < 800


def test_repository_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"nobody/nothing: no such directory.*HF_HUB_OFFLINE"
    ):
        load("nobody/nothing")
    for name in ("a/b/c", "/no/where", "./x", "-bad-", "a b"):
        with pytest.raises(FileNotFoundError, match=f"{name}: no such directory"):
            load(name)


def test_code_of_the_tokenizer_is_not_run(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
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
def test_unreadable(name: str, tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "model"
        shutil.copytree(tiny_model, path)
        path.chmod(0o755)
        (path / name).chmod(0)
        with somebody_else():
            with pytest.raises(PermissionError, match=str(path)):
                load(path)
            code, line = run_cli("info", "--model", str(path))
        assert code == 2
        check_line(line)
        assert str(path) in line
        (path / name).chmod(0o755)


def test_target_is_taken(plain_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    for name, says in (("file", "not a directory"), ("full", "not empty")):
        code, line = run_cli(
            "convert", "--hf-path", str(plain_model), "--mlx-path", str(tmp_path / name)
        )
        assert code == 2
        check_line(line)
        assert str(tmp_path / name) in line and says in line
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes").read_text() == "mine"
    assert len(list(tmp_path.rglob("*"))) == 3


def test_quantized_already(tiny_model: Path, tmp_path: Path) -> None:
    code, line = run_cli(
        "convert", "--hf-path", str(tiny_model), "--mlx-path", str(tmp_path / "out")
    )
    assert code == 2
    check_line(line)
    assert "already quantized" in line


def test_no_room(monkeypatch: pytest.MonkeyPatch, plain_model: Path, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    code, line = run_cli(
        "convert", "--hf-path", str(plain_model), "--mlx-path", str(tmp_path / "out")
    )
    assert code == 2
    check_line(line)
    assert "0.1 MB are free" in line
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [4_000, 60_000])
def test_disk_full(limit: int, plain_model: Path, tmp_path: Path) -> None:
    """Writes that fail half-way, as on a full disk, here at a limit to the size of a file."""
    script = (
        "import resource, sys; from mlx_qlayers.cli import main; import mlx_lm;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["convert", "--hf-path", str(plain_model), "--mlx-path", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    check_line(done.stderr)
    assert "cannot be written" in done.stderr or "File too large" in done.stderr
    assert not any(tmp_path.iterdir())


def table() -> str:
    """Every case of this file with its message."""
    from tiny_model import save_tiny_model

    rows = [
        "What bad input is told, by `python tests/test_bad_input.py`; each exits with code 2.",
        "",
        "| what is wrong | what is said |",
        "|---|---|",
    ]

    def add(name: str, folder: str, *arguments: str) -> None:
        code, line = run_cli(*arguments)
        assert code == 2, name
        message = line.strip().replace(folder + "/", "").replace("|", "\\|")
        rows.append(f"| {name} | {message.partition('error: ')[2]} |")

    with tempfile.TemporaryDirectory() as folder:
        sound = save_tiny_model(Path(folder) / "sound")
        narrow = save_tiny_model(Path(folder) / "narrow", quantized=False, hidden_size=64)
        for case in CASES:
            path = Path(folder) / "model"
            shutil.copytree(sound, path)
            case.damage(path)
            add(case.name, folder, "generate", "--model", str(path), "--prompt", "x")
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        for name, arguments, _ in ARGUMENTS:
            add(name, folder, "generate", "--model", str(sound), *arguments)
        for name, arguments, _ in CONVERSIONS:
            out = str(Path(folder) / "out")
            add(name, folder, "convert", "--hf-path", str(narrow), "--mlx-path", out, *arguments)
    return "\n".join(rows) + "\n"


def test_table_is_complete() -> None:
    stored = Path(__file__).with_name("BAD_INPUT.md").read_text()
    names = [*map(str, CASES), *(a[0] for a in ARGUMENTS), *(c[0] for c in CONVERSIONS)]
    assert len(names) == len(set(names)) >= 30
    assert [line.split(" | ")[0][2:] for line in stored.splitlines() if line.startswith("| ")][
        1:
    ] == names


if __name__ == "__main__":
    sys.stdout.write(table())
