"""Text from a model as it streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

import mlx.nn as nn

if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse
    from mlx_lm.tokenizer_utils import TokenizerWrapper


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
) -> GenerationResponse:
    """Write up to ``max_tokens`` tokens to ``echo`` as they come; the last, with their speed."""
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    sampler = make_sampler(temp=temp)
    responses = stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, sampler=sampler)
    for response in responses:  # at least one
        if echo:
            print(response.text, end="", flush=True, file=echo)
    if echo:
        print(file=echo)
    return response
