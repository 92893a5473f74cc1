"""The command line: what it prints where, its exit codes, and what it does not import."""

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from command_line import COMMAND, complaints
from tiny_model import save_tiny_model

from mlx_qlayers.cli import main


def test_traceback_on_request(tmp_path, capsys):
    arguments = ["info", "--model", str(tmp_path / "none")]
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert main([*arguments, "--traceback"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback") and text.endswith(line) and "loading.py" in text


def test_an_unforeseen_error_is_named(tiny_model, monkeypatch, capsys):
    def fail(*args: object, **options: object) -> None:
        raise KeyError("several\nlines " + "x" * 1000)

    monkeypatch.setattr("mlx_lm.stream_generate", fail)
    assert main(["generate", "--model", str(tiny_model), "--prompt", "p"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("mlx-qlayers: error: KeyError: ") and line.count("\n") == 1
    assert "--traceback" in line and len(line) < 700


def test_usage_errors_take_one_line(capsys):
    for arguments in ([], ["nonsense"], ["generate"], ["info", "--model"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["tune", "\x1b[31m", "a\nb"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "\x1b" not in line
    for arguments in (["--help"], ["convert", "--help"], ["--version"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory):
    """A model whose text does not end before somebody ends it."""
    return save_tiny_model(tmp_path_factory.mktemp("endless") / "model", endless=True)


def test_letters_that_the_terminal_lacks(tiny_model, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii", write_through=True))
    arguments = ["--model", str(tiny_model), "--prompt", "a", "--max-tokens", "40"]
    assert main(["generate", *arguments, "--temp", "3", "--seed", "1"]) == 0
    assert b"?" in printed.getvalue()


@contextmanager
def generating(model: Path) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A command that has begun to print, and its output; what it says of its end is no error."""
    arguments = ["generate", "--model", str(model), "--prompt", "a", "--max-tokens", "100000"]
    with subprocess.Popen(
        [*COMMAND, *arguments, "--temp", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        yield process, process.stdout
        assert not complaints(process.stderr.read())


def test_interrupt_is_quiet(endless_model):
    with generating(endless_model) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize("module", [b"mlx_qlayers.formats", b"mlx_qlayers.convert", b"tqdm"])
def test_interrupt_amid_imports_is_quiet(module):
    """Those of the package, and those that a command makes."""
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "demo"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split()[-1] == module:
                break
        process.send_signal(signal.SIGINT)
        text = process.stderr.read()
        assert process.wait(60) == 130 and b"Traceback" not in text


def test_a_reader_that_leaves_is_no_error(endless_model):
    with generating(endless_model) as (process, output):
        output.close()
        assert process.wait(60) == 141
