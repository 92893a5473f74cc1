"""Prompts as tokens."""

from __future__ import annotations

from pathlib import Path

import mlx_lm
import pytest

from mlx_qlayers.commands.text import encode


def test_chat_template_is_used_where_there_is_one(tiny_model: Path) -> None:
    _, tokenizer = mlx_lm.load(str(tiny_model))
    plain = encode(tokenizer, "king", chat=True)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer.has_chat_template = True
    assert encode(tokenizer, "king", chat=True) == tokenizer.encode("[king]")
    assert encode(tokenizer, "king", chat=False) == plain == tokenizer.encode("king")


def test_prompts_without_tokens_are_refused(tiny_model: Path) -> None:
    _, tokenizer = mlx_lm.load(str(tiny_model))
    for prompt, reason in (("", "has no tokens"), ("\udcff", "is not text in UTF-8")):
        with pytest.raises(ValueError, match=reason):
            encode(tokenizer, prompt, chat=True)
