"""A command line is checked before any work: a table of hostile values of all options."""

import argparse
import contextlib
import importlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import outcome

from mlx_qlayers import cli
from mlx_qlayers.commands.ranges import RANGES

BORROWED = ("generate", "chat", "server", "lora", "fuse")
# Options that may be empty, or are a text in which every letter is right.
FREE = {"prompt", "system_prompt", "prefill_response", "chat_template", "adapter_path", "verbose"}
NUMBERS = {
    int: ["nan", "1e3", "1.5", "", "ten", "-9", "-99999999999", "9" * 30, "9" * 5000, "\x1b[31m"],
    float: ["nan", "inf", "-inf", "1e999", "", "x", "-1e30", "1e30", "\x00"],
}


class Parsed(Exception):
    """The arguments of a command were taken."""


def options() -> dict[tuple[str, str], argparse.Action]:
    """Every option with a value, by command and name: ours, and mlx-lm's where one is borrowed."""
    parsers = dict(next(iter(cli._parser()._subparsers._group_actions)).choices)  # type: ignore
    found = [(name, a) for name, p in parsers.items() for a in p._actions]

    def grab(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Parsed(parser)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(None):
        patch.setattr(argparse.ArgumentParser, "parse_args", grab)
        for name in BORROWED:
            with pytest.raises(Parsed) as parsed:
                importlib.import_module(f"mlx_lm.{name}").main()
            found += [(name, a) for a in parsed.value.args[0]._actions]
    return {
        (name, action.option_strings[-1]): action
        for name, action in reversed(found)  # ours come first on the command line
        if action.nargs != 0 and action.option_strings
    }


OPTIONS = options()
REQUIRED = {
    "generate": ["--model", "m", "--prompt", "p"],
    "convert": ["--hf-path", "m", "--mlx-path", "out"],
    "quantize": ["--model", "m", "--mlx-path", "out"],
    "perplexity": ["--model", "m"],
}


@pytest.fixture(autouse=True)
def no_work(monkeypatch, tmp_path):
    """Loading a model is where the work of a command begins."""

    def work(*args: Any, **options: Any) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr("mlx_lm.utils.load_model", work)
    monkeypatch.setattr("mlx_lm.server.run", work)
    monkeypatch.chdir(tmp_path)


def refused(*arguments: str) -> str:
    """The message about a command line, in one line."""
    code, _, line = outcome(*arguments)
    assert code == 2, line
    assert line.startswith("mlx-qlayers") and line.count("\n") == 1 and len(line) < 800, line
    assert "work has begun" not in line and "\x1b" not in line
    return line


def hostile() -> Iterator[tuple[str, str, list[str]]]:
    for (command, option), action in OPTIONS.items():
        kind: Any = action.type
        if kind in NUMBERS:
            yield command, option, NUMBERS[kind]
        elif action.choices is not None:
            yield command, option, ["", "nonsense"]
        elif action.dest not in FREE and action.nargs is None:
            yield command, option, ["", "a\0b"]


HOSTILE = {f"{command} {option}": values for command, option, values in hostile()}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused_by_name(name):
    command, option = name.split()
    for value in HOSTILE[name]:
        line = refused(command, *REQUIRED.get(command, []), f"{option}={value}")
        assert f"{option}: " in line or f"{option}/" in line or f"/{option}" in line, line


def test_every_number_has_a_range():
    numbers = {a.dest for a in OPTIONS.values() if a.type in NUMBERS}
    assert numbers <= RANGES.keys() and len(OPTIONS) > 100 and len(numbers) > 30


def lora(tmp_path: Path, entries: Any) -> list[str]:
    """The arguments for a file with entries."""
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    (data / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "c.yaml").write_text(json.dumps(entries))
    return ["--train", "--data", str(data), "-c", str(tmp_path / "c.yaml")]


TABLE: list[tuple[list[str], str]] = [
    # Nobody has that name, so it is no home folder.
    (["bench", "--from", "~nobody-here"], "~nobody-here"),
    (["info", "--model", "~nobody-here"], "~nobody-here"),
    (["quantize", "--model", "m", "--mlx-path", "o", "--bits-per-weight", "nan"], "not nan"),
    (["quantize", "--model", "m", "--mlx-path", "o", "--bits-per-weight", "0"], "not 0.0"),
    (
        ["quantize", "--model=m", "--mlx-path=o", "--bits-per-weight=3", "--method=rtn"],
        "needs --method gptq",
    ),
    (["quantize", "--model", "m", "--mlx-path", "o", "--group-size", "48"], "group_size"),
    (["quantize", "--model", "m", "--mlx-path", "o", "--text", "none"], "none: no such file"),
    (["quantize", "--model", "m", "--mlx-path", "taken"], "not a directory"),
    (["perplexity", "--model", "m", "--text", "none"], "none: no such file"),
    (["perplexity", "--model", "m", "--text", "taken", "--reference", "no/where"], "no/where"),
    (["convert", "--hf-path", "m", "--mlx-path", ""], "--mlx-path: must not be empty"),
    (["convert", "--hf-path", "m", "--mlx-path", "o", "--upload-repo", "a b"], "--upload-repo"),
    (["generate", "--model", "m", "--prompt", "p", "--adapter-path", "none"], "none"),
    (["generate", "--model", "m", "--prompt", "p", "--prompt-cache-file", "none"], "no such file"),
    (["generate", "--model", "m", "--prompt", "p", "--chat-template-config", "[]"], "JSON object"),
    (["generate", "--model", "m", "--prompt", "p", "--draft-model", "no/where"], "no/where"),
    (["generate", "--model", "m", "--prompt", "p", "--backend", "gpu"], "gpu"),
    (["generate", "--model", "m", "--prompt", "p", "--max-tokens", "0"], "1 to 2**31 - 1, not 0"),
    (["generate", "--model", "m", "--prompt", "p", "--tokens", "3"], "--tokens"),
    (["generate", "--model", "m", "--prompt", ""], "prompt ''"),
    (["generate", "--model", "m", "--prompt", "\udcff"], "not text in UTF-8"),
    (["generate", "--model", "m"], "--prompt"),
    (["chat", "--model", "m", "--backend", "gpu"], "gpu"),
    (["chat", "--model", "m", "--adapter-path", "none"], "none"),
    (["chat", "--model", "/no/where"], "/no/where"),
    (["server", "--model", "/no/where"], "/no/where"),
    (["server", "--nonsense", "3"], "unrecognized arguments: --nonsense 3"),
    (["server", "--model", "m", "--adapter-path", "none"], "none"),
    (["server", "--model", "m", "--draft-model", "no/where"], "no/where"),
    (["server", "--model", "m", "--host", "256.0.0.1"], "Errno"),
    (["server", "--model", "m", "--chat-template-args", "5"], "JSON object"),
    (["server", "--model", "m", "--prompt-cache-bytes", "5X"], "--prompt-cache-bytes"),
    (["lora", "--model", "m"], "--train or --test"),
    (["lora", "--model", "m", "--test", "--adapter-path", "none"], "none"),
    (["lora", "--model", "m", "--train", "--data", "."], "train.jsonl: no such file"),
    (["lora", "--model", "m", "-c", "none"], "none: no such file"),
    (["fuse", "--model", "m", "--adapter-path", "none"], "none"),
    (["fuse", "--model", "m", "--save-path", "taken"], "not a directory"),
    (["bench", "--only", "nonsense"], "no benchmark is called nonsense; there are"),
    (["bench", "--out", "taken"], "not a directory"),
    (["doctor", "--only", "nonsense"], "nonsense"),
]


@pytest.mark.parametrize(("arguments", "says"), TABLE, ids=lambda x: " ".join(x)[:70])
def test_refused_before_work(arguments, says, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "taken").write_text("a text")
    assert says in refused(*(str(tiny_model) if word == "m" else word for word in arguments))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"iters": -5}, "iters: must be"),
        ({"learning_rate": "1e-5"}, "learning_rate: must be a number"),
        ({"save_every": 0}, "save_every"),
        ({"adapter_path": "c.yaml"}, "not a directory"),
        ({"model": 5}, "model: must be of type str"),
        ({"lora_parameters": True}, "lora_parameters: must be of type dict"),
        ({"lr_schedule": {"name": "none", "arguments": [1]}}, "lr_schedule: AttributeError"),
        ({"optimizer_config": {"adam": {"beta": 1}}}, "optimizer, lr_schedule: TypeError"),
        (["a", "list"], "a value for each name"),
        ({"lora_parameters": {"rank": 0, "dropout": 0.0, "scale": 1.0}}, "rank: must be"),
        ({"lora_parameters": {"rank": 4, "dropout": 1.0, "scale": 1.0}}, "dropout: must be"),
    ],
    ids=str,
)
def test_what_a_file_of_lora_says_is_checked_too(entries, says, tmp_path):
    assert says in refused("lora", *lora(tmp_path, entries))


def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = refused("server", "--model", "m", "--port", str(taken.getsockname()[1]))
    assert "Errno" in line


def test_values_that_are_taken():
    for command, option, value in (
        ("generate", "--seed", str(2**64 - 1)),
        ("chat", "--temp", "0"),
        ("lora", "--num-layers", "-1"),
        ("quantize", "--bits-per-weight", "4.5"),
        ("server", "--port", "0"),
        ("generate", "--system-prompt", ""),
    ):
        action = OPTIONS[command, option]
        parser = cli.Parser()
        parser.add_argument(option, type=action.type)
        assert str(getattr(parser.parse_args([f"{option}={value}"]), action.dest)) in (
            value, f"{value}.0",
        )  # fmt: skip
