"""The command line: what it prints where, its exit codes, and what it does not import."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from tiny_model import save_tiny_model

from mlx_qlayers.cli import main
from mlx_qlayers.commands import demo, generate
from mlx_qlayers.commands.text import encode

COMMAND = [sys.executable, "-m", "mlx_qlayers"]
PROMPT = "Once upon a time"


def complaints(stderr: bytes) -> list[bytes]:
    """What a command says besides that it compiles a kernel for the first time."""
    return [line for line in stderr.splitlines() if b"compiling kernel" not in line]


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized checkpoint in float32, in which greedy choices do not depend on rounding."""
    path = tmp_path_factory.mktemp("exact") / "model"
    return save_tiny_model(path, dtype=mx.float32, torch_dtype="float32", seed=3)


@pytest.mark.parametrize("stock", [[], ["--no-fuse"], ["--stock"]], ids=str)
def test_generate_says_what_mlx_lm_says(
    stock: list[str], exact_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(exact_model), "--prompt", PROMPT, "--max-tokens", "40"]
    assert main(["generate", *arguments, *stock]) == 0
    out, err = capsys.readouterr()
    model, tokenizer = mlx_lm.load(str(exact_model))
    assert out == mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=40) + "\n"
    assert re.fullmatch(
        r"(mlx-qlayers: compiling kernel .*\n)*"
        r"prompt: \d+ tokens, [\d.]+ tokens/s; text: \d+ tokens, [\d.]+ tokens/s; "
        r"peak memory [\d.]+ GB\n",
        err,
    )


def test_sampling_follows_the_seed(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in (1, 1, 2):
        arguments = ["--model", str(tiny_model), "--prompt", PROMPT, "--max-tokens", "20"]
        assert main(["generate", *arguments, "--temp", "1.5", "--seed", str(seed)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_prompt_from_standard_input(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    texts = []
    for prompt in ("-", PROMPT):
        arguments = ["--model", str(tiny_model), "--max-tokens", "5", "--prompt", prompt]
        assert main(["generate", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_chat_template_is_used_where_there_is_one(tiny_model: Path) -> None:
    _, tokenizer = mlx_lm.load(str(tiny_model))
    plain = encode(tokenizer, "king", chat=True)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer.has_chat_template = True
    assert encode(tokenizer, "king", chat=True) == tokenizer.encode("[king]")
    assert encode(tokenizer, "king", chat=False) == plain == tokenizer.encode("king")


def test_info_names_versions_device_and_backends(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--model", str(tiny_model)]) == 0
    out, err = capsys.readouterr()
    for name in ("python", "mlx", "mlx-lm", "device", "memory", "backend", "  metal", "  ops"):
        assert re.search(rf"^{name} +\S", out, re.MULTILINE), name
    assert "qwen2" in out and err == ""


def test_info_does_not_convert(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in tiny_model.iterdir()}
    assert main(["info", "--model", str(tiny_model)]) == 0
    assert before == {path: path.read_bytes() for path in tiny_model.iterdir()}


def test_demo_prints_report_text_and_speeds(
    exact_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(exact_model), "--max-tokens", "30", "--temp", "0"]
    assert main(["demo", *arguments]) == 0
    out, err = capsys.readouterr()
    model, tokenizer = mlx_lm.load(str(exact_model))
    prompt = "Once upon a time there was a king"
    text = prompt + mlx_lm.generate(model, tokenizer, prompt, max_tokens=30)
    report, found, speeds = out.partition(text)
    assert found and "17 swapped" in report
    assert not complaints(err.encode())
    for row in ("stock", "converted, reference path", "converted, Metal kernels on the"):
        assert re.search(rf"^{row}.* +[\d.]+ +[\d.]+$", speeds, re.MULTILINE), row


def test_demo_finds_the_model_of_the_repository() -> None:
    path = demo.shipped_model()
    assert path == Path(__file__).parents[1] / "models" / demo.MODEL
    assert (path / "config.json").exists()


def test_traceback_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["info", "--model", str(tmp_path / "none")]
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert main([*arguments, "--traceback"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback") and text.endswith(line) and "loading.py" in text


def test_an_unforeseen_error_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> None:
        raise KeyError("several\nlines " + "x" * 1000)

    monkeypatch.setattr(generate, "run", fail)
    assert main(["generate", "--model", "m", "--prompt", "p"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("mlx-qlayers: error: KeyError: ") and line.count("\n") == 1
    assert "--traceback" in line and len(line) < 700


def test_usage_errors_take_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["generate"], ["info", "--model"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for arguments in (["--help"], ["convert", "--help"], ["--version"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text does not end before somebody ends it."""
    return save_tiny_model(tmp_path_factory.mktemp("endless") / "model", endless=True)


def test_interrupt_is_quiet(endless_model: Path) -> None:
    arguments = ["generate", "--model", str(endless_model), "--prompt", "a"]
    arguments += ["--max-tokens", "100000"]
    with subprocess.Popen(
        [*COMMAND, *arguments, "--temp", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not complaints(process.stderr.read())


def test_a_reader_that_leaves_is_no_error(endless_model: Path) -> None:
    arguments = ["generate", "--model", str(endless_model), "--prompt", "a"]
    arguments += ["--max-tokens", "100000"]
    with subprocess.Popen(
        [*COMMAND, *arguments, "--temp", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 141
        assert not complaints(process.stderr.read())


def test_letters_that_the_terminal_lacks(tiny_model: Path) -> None:
    arguments = ["generate", "--model", str(tiny_model), "--prompt", "a", "--max-tokens", "40"]
    done = subprocess.run(
        [*COMMAND, *arguments, "--temp", "3"],
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert b"?" in done.stdout


def test_progress_on_a_terminal_only(plain_model: Path, tmp_path: Path) -> None:
    arguments = [*COMMAND, "convert", "--hf-path", str(plain_model), "--mlx-path"]
    piped = subprocess.run([*arguments, str(tmp_path / "a")], capture_output=True, check=True)
    assert not complaints(piped.stderr)
    assert piped.stdout.decode().startswith(f"{tmp_path / 'a'}: 15 quantized layers")
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 100))
    with subprocess.Popen(
        [*arguments, str(tmp_path / "b")], stdout=subprocess.DEVNULL, stderr=secondary
    ) as process:
        os.close(secondary)
        shown = b""
        try:
            while chunk := os.read(primary, 1024):
                shown += chunk
        except OSError:  # how Linux reports that the other end was closed
            pass
        assert process.wait(60) == 0
    os.close(primary)
    assert b"quantizing: 100%" in shown


def test_help_imports_no_models() -> None:
    script = (
        "import sys; from mlx_qlayers.cli import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('mlx_lm', 'transformers', 'tqdm')))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
