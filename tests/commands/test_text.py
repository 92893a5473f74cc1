"""Prompts that no vocabulary can take, and text as it streams."""

from __future__ import annotations

import io
from pathlib import Path

import mlx_lm
import pytest

from mlx_qlayers.commands.text import check_prompt, stream


def test_prompts_without_tokens_are_refused() -> None:
    check_prompt("x")
    for prompt, reason in (("", "has no tokens"), ("\udcff", "is not text in UTF-8")):
        with pytest.raises(ValueError, match=reason):
            check_prompt(prompt)


def test_text_and_progress(tiny_model: Path) -> None:
    model, tokenizer = mlx_lm.load(str(tiny_model))
    echo, steps = io.StringIO(), list[int]()
    last = stream(
        model, tokenizer, [5, 6], echo=echo, progress=lambda: steps.append(1), max_tokens=4
    )
    assert len(steps) == last.generation_tokens == 4
    assert echo.getvalue() == mlx_lm.generate(model, tokenizer, [5, 6], max_tokens=4) + "\n"
