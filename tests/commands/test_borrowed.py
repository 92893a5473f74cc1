"""mlx-lm's server, chat, lora and fuse with the shipped model converted."""

import argparse
import io
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from commands.test_serving import CHAT, COMPLETE, ask, rest, serving, start

from mlx_qlayers import convert_model, explain
from mlx_qlayers.cli import main
from mlx_qlayers.commands import borrowed
from mlx_qlayers.conversion.kv_mixture import value_mixture
from mlx_qlayers.decode.quantized_caches import CacheFormat, RotatingQuantizedKVCache
from mlx_qlayers.runtime.backend import backend, requested
from tests.load import model_in
from tests.numerics import assert_same_losses, assert_same_model

PROMPT, TOKENS = "Once upon a time there was a king", 12


@pytest.fixture(scope="module")
def talker():
    """Two layers of the shipped model in float32, where choices do not hang on rounding."""
    with model_in(mx.float32, layers=2) as folder:
        yield folder


@pytest.fixture(scope="module")
def expected(talker):
    model, tokenizer = mlx_lm.load(str(talker))
    return mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def server(talker, tmp_path_factory):
    """The address of a running server and what it writes."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(talker, "--max-tokens", str(TOKENS), log=log) as (address, _):
        yield address, log


def test_server_answers_as_stock(server, expected):
    address, log = server
    (completed,) = ask(address, COMPLETE, {"prompt": PROMPT})[1]["choices"]
    assert completed["text"] == expected
    (chosen,) = ask(address, CHAT, {"messages": [{"role": "user", "content": PROMPT}]})[1][
        "choices"
    ]
    assert chosen["message"]["content"] == expected
    assert "19 swapped" in log.read_text()
    streamed = rest(start(address, PROMPT, TOKENS)).decode()
    parts = [line.removeprefix("data: ") for line in streamed.splitlines() if "{" in line]
    assert "".join(json.loads(part)["choices"][0]["text"] for part in parts) == expected


@pytest.mark.parametrize(
    "flags", [[], ["--no-fuse", "--backend", "reference"], ["--stock"]], ids=str
)
def test_chat_by_script(flags, talker, expected, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nr\n{PROMPT}\nq\n"))
    explain(reset=True)
    arguments = ["--model", str(talker), "--max-tokens", str(TOKENS), "--temp", "0"]
    assert main(["chat", *arguments, *flags]) == 0
    out, err = capsys.readouterr()
    assert out.count(expected) == 2
    report = {0: "19 swapped; decodes by graphs\n", 1: "", 3: "19 swapped\n"}[len(flags)]
    assert "".join(line for line in err.splitlines(True) if "compiling" not in line) == report
    decisions = explain()
    assert bool(decisions) == ("--stock" not in flags)
    if "reference" in flags:
        assert {(d.path, d.reason) for d in decisions} == {("reference", "asked for")}


def test_chat_goes_on_with_guesses(talker, capsys, monkeypatch):
    """Of what was said before, and of a draft whose caches go on with the chat."""
    said = []
    for flags in ([], ["--prompt-lookup", "--draft-model", str(talker), "--num-draft-tokens", "3"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n{PROMPT}\nr\n{PROMPT}\nq\n"))
        arguments = ["--model", str(talker), "--max-tokens", "30", "--temp", "0"]
        assert main(["chat", *arguments, *flags]) == 0
        out, err = capsys.readouterr()
        said.append([line for line in out.splitlines() if "tok/s" not in line])
    assert said[0] == said[1] and err.count("guesses: ") == 3


@pytest.mark.parametrize("option", ["--kv-bits=8", "--kv-bits-per-value=4.6"])
def test_chat_with_quantized_windows(option, talker, capsys, monkeypatch):
    """The text is that of the stock model with such caches, which mlx-lm's chat lacks."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\nq\n"))
    options = ["--max-kv-size=16", option, "--kv-group-size=32", "--max-tokens=30"]
    assert main(["chat", f"--model={talker}", "--temp=0", *options]) == 0
    model, tokenizer = mlx_lm.load(str(talker))
    formats = [CacheFormat(32, 8)] * len(model.layers)
    if option != "--kv-bits=8":
        convert_model(model)  # as stock attention does not take what is measured
        formats = value_mixture(model, tokenizer, 4.6, form=formats[0])
        assert len({*formats}) > 1
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    cache = [RotatingQuantizedKVCache(16, 4, form=each) for each in formats]
    wanted = mlx_lm.generate(model, tokenizer, prompt, max_tokens=30, prompt_cache=cache)
    assert wanted in capsys.readouterr().out


def test_server_with_guesses(server, talker, tmp_path):
    """One text that was sampled with a seed, one that goes on from its caches, and one alone."""
    log = tmp_path / "log"

    def said(address: str) -> list[str]:
        prompt, texts = PROMPT, []
        for temperature in (0.8, 0.0):
            body = {"prompt": prompt, "temperature": temperature, "seed": 5, "max_tokens": 24}
            (answer,) = ask(address, COMPLETE, body)[1]["choices"]
            texts.append(answer["text"])
            prompt += answer["text"]
        (answer,) = ask(address, COMPLETE, body | {"num_draft_tokens": 3})[1]["choices"]
        return [*texts, answer["text"]]

    with serving(talker, "--prompt-lookup", "--draft-model", str(talker), log=log) as (address, _):
        texts = said(address)
    assert texts == said(server[0]) and texts[1] == texts[2]
    assert re.search(r"guesses: \d+ of \d+ accepted", log.read_text())


def test_chat_ends_at_the_end_of_its_input(talker, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--model", str(talker), "--report"]) == 0
    err = capsys.readouterr().err
    assert "error" not in err and "model.layers.0-1.mlp.gate_proj" in err


def test_the_backend_holds_in_threads_of_the_command(monkeypatch):
    seen = []

    def serve() -> None:
        thread = Thread(target=lambda: seen.append(requested()))
        thread.start()
        thread.join()

    monkeypatch.setattr(import_module("mlx_lm.server"), "main", serve)
    assert main(["server", "--backend", "reference"]) == 0
    assert seen == ["reference"] and requested() == "auto"


def texts(folder: Path) -> Path:
    """A little to learn, as mlx-lm's commands read it."""
    folder.mkdir()
    for name in ("train", "valid"):
        lines = [json.dumps({"text": f"{PROMPT} who had {n} sons."}) for n in range(8)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def loss(model: nn.Module, tokens: mx.array) -> float:
    return nn.losses.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="mean").item()


def test_lora_trains_what_stock_loads(talker, tmp_path, capsys):
    arguments = ["--model", str(talker), "--train", "--data", str(texts(tmp_path / "data"))]
    arguments += ["--iters", "3", "--batch-size", "2", "--num-layers", "2"]
    arguments += ["--learning-rate", "2e-4", "--val-batches", "0"]
    for flag in ("--val-batches=1", "--stock-loss", "--optimizer-bits=8", "--stock"):
        folder = ["--adapter-path", str(tmp_path / f"with{flag}")]
        assert main(["lora", *arguments, *folder, flag]) == 0
        err = capsys.readouterr().err
        assert ("19 swapped" in err) == (flag != "--stock")
        assert ("fused loss of model.embed_tokens" in err) == ("--stock" not in flag)
    losses = []
    for adapters in (None, *sorted(map(str, tmp_path.glob("with*")))):
        model, tokenizer = mlx_lm.load(str(talker), adapter_path=adapters)
        losses.append(loss(model, mx.array(tokenizer.encode(f"{PROMPT} who had 3 sons."))))
    untrained, eighths, theirs, logits, ours = losses
    assert_same_losses([ours, logits], [theirs] * 2)
    assert ours < 0.95 * untrained
    assert eighths != ours and untrained - eighths == pytest.approx(untrained - ours, rel=0.05)


def test_a_plan_of_lora_trains_nothing(talker, tmp_path, capsys):
    arguments = ["--model", str(talker), "--train", "--data", str(texts(tmp_path / "data"))]
    arguments += ["--batch-size", "2", "--num-layers", "2", "--plan", "--memory", "1"]
    assert main(["lora", *arguments, "--adapter-path", str(tmp_path / "adapters")]) == 0
    lines = capsys.readouterr().out.splitlines()[-7:]
    assert [line[:7] for line in lines[:4]] == ["weights", "adapter", "optimiz", "activat"]
    assert lines[5].startswith("2 x 32 tokens") and lines[6].endswith("tokens fit in 1 GB")
    assert not (tmp_path / "adapters").exists()
    arguments += ["--optimizer-bits", "8"]
    assert main(["lora", *arguments, "--adapter-path", str(tmp_path / "adapters")]) == 0
    whole, eighths = (
        float(line.split()[1]) for line in (lines[2], capsys.readouterr().out.splitlines()[-5])
    )
    assert eighths < whole
    assert main(["lora", *arguments, "--optimizer", "sgd"]) == 2
    assert "--optimizer-bits 8: for adam or adamw, not sgd" in capsys.readouterr().err


def test_lora_names_data_that_is_not_there(tiny_model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    assert main(["lora", "--model", str(tiny_model), "--train", "--data", "no/where"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mlx-qlayers: error: --data no/where: no such directory;")
    assert "pip install datasets" in error


def test_a_step_of_lora_runs_kernels_on_a_cpu(talker, tmp_path):
    """A step that ``mx.compile`` has traced would run none."""
    arguments = ["--model", str(talker), "--train", "--data", str(texts(tmp_path / "data"))]
    arguments += ["--iters", "1", "--batch-size", "1", "--num-layers", "1", "--val-batches", "0"]
    explain(reset=True)
    assert main(["lora", *arguments, "--adapter-path", str(tmp_path / "adapters")]) == 0
    paths = {d.path for d in explain() if d.op == "quantized_matmul"}
    assert paths == ({"host"} if backend() == "host" else {backend()})
    counted = []
    twice = mx.compile(lambda x: (counted.append(1), x + x)[1])
    assert [twice(mx.ones(1)).item() for _ in range(2)] == [2.0, 2.0]
    assert len(counted) == 1  # compilation is on again


def test_adapters_are_fused_as_mlx_lm_fuses_them(exact_model, adapters, tmp_path, monkeypatch):
    arguments = ["--model", str(exact_model), "--adapter-path", str(adapters), "--save-path"]
    assert main(["fuse", *arguments, str(tmp_path / "ours")]) == 0
    monkeypatch.setattr(sys, "argv", ["fuse", *arguments, str(tmp_path / "theirs")])
    import_module("mlx_lm.fuse").main()
    for name in ("model.safetensors", "config.json"):
        ours, theirs = ((tmp_path / by / name).read_bytes() for by in ("ours", "theirs"))
        assert ours == theirs
    assert main(["fuse", *arguments, str(tmp_path / "dense"), "--dequantize"]) == 0
    (fused, _), (unfused, _) = (
        mlx_lm.load(str(tmp_path / "dense")),
        mlx_lm.load(str(exact_model), adapter_path=str(adapters)),
    )
    assert not any("scales" in module for module in fused.modules())
    tokens = mx.array([[5, 6, 7]])
    assert_same_model(fused(tokens), unfused(tokens), bits=None, what="fused")


def test_a_model_without_quantized_layers(plain_model, tmp_path):
    arguments = ["--model", str(plain_model), "--test", "--data", str(tmp_path)]
    lines = "\n".join(json.dumps({"text": PROMPT}) for _ in range(2))
    (tmp_path / "test.jsonl").write_text(lines)
    assert main(["lora", *arguments, "--adapter-path", "", "--batch-size", "1"]) == 0


@pytest.mark.parametrize("name", ["server", "chat", "lora", "fuse", "generate"])
def test_help_is_both(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--no-fuse" in out and "--adapter-path" in out and "mlx_lm" not in out.split("\n")[0]


@pytest.mark.parametrize("name", ["server", "chat", "lora", "fuse", "generate"])
def test_no_option_hides_one_of_mlx_lm(name):
    theirs: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        theirs.append(parser)
        raise SystemExit

    with patch.object(argparse.ArgumentParser, "parse_args", stop), pytest.raises(SystemExit):
        import_module(f"mlx_lm.{name}").main()
    ours = argparse.ArgumentParser(add_help=False)
    borrowed.add_arguments(ours)
    options = set(ours._option_string_actions) & set(theirs[0]._option_string_actions)
    assert options == {"-h", "--help"}
