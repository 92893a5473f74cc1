"""The command generate: text, speeds, sampling, and where the prompt comes from."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import mlx_lm
import pytest
from command_line import PROMPT

from mlx_qlayers.cli import main


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
