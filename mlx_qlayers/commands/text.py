"""Text from a model as it streams, and how fast it came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import mlx.nn as nn

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class Speed:
    """Tokens and tokens per second of one prompt and its continuation."""

    prompt_tokens: int
    prompt_rate: float
    tokens: int
    rate: float
    peak_bytes: float

    def __str__(self) -> str:
        return (
            f"prompt: {self.prompt_tokens} tokens, {self.prompt_rate:.1f} tokens/s; "
            f"text: {self.tokens} tokens, {self.rate:.1f} tokens/s; "
            f"peak memory {self.peak_bytes / 1e9:.3f} GB"
        )


def encode(tokenizer: TokenizerWrapper, prompt: str, *, chat: bool) -> list[int]:
    """The tokens of ``prompt``, as a chat's first message where the tokenizer has a template.

    Raises:
        ValueError: there are none, or ``prompt`` is made of bytes that were not UTF-8.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {prompt!r} is not text in UTF-8") from error
    if chat and prompt and tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    if not (tokens := tokenizer.encode(prompt)):
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    return tokens


def stream(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    *,
    max_tokens: int,
    temp: float = 0.0,
    echo: TextIO | None = None,
) -> Speed:
    """Generate up to ``max_tokens`` tokens, writing them to ``echo`` as they come."""
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    last = None
    for last in stream_generate(
        model, tokenizer, prompt, max_tokens=max_tokens, sampler=make_sampler(temp=temp)
    ):
        if echo:
            print(last.text, end="", flush=True, file=echo)
    if echo:
        print(file=echo)
    assert last is not None  # max_tokens is at least 1
    return Speed(
        last.prompt_tokens,
        last.prompt_tps,
        last.generation_tokens,
        last.generation_tps,
        last.peak_memory * 1e9,
    )
