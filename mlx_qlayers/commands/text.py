"""Text from a model as it streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

import mlx.nn as nn

if TYPE_CHECKING:
    from mlx_lm.generate import GenerationResponse
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def check_prompt(prompt: str) -> None:
    """Raise a ValueError for a prompt that is empty, or made of bytes that were not UTF-8."""
    if not prompt:
        raise ValueError("the prompt '' has no tokens")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {prompt!r} is not text in UTF-8") from error


def stream(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    stream_generate: Callable[..., Iterable[GenerationResponse]] | None = None,
    *,
    echo: TextIO | None = None,
    progress: Callable[[], object] | None = None,
    **options: Any,
) -> GenerationResponse:
    """Write tokens to ``echo`` as they come, of which there is one at least; the last of them, with
    their speed. ``progress`` is called after each.
    """
    from mlx_lm import stream_generate as theirs

    for response in (stream_generate or theirs)(
        model, tokenizer, prompt, **options
    ):  # at least one
        if echo:
            print(response.text, end="", flush=True, file=echo)
        if progress:
            progress()
    if echo:
        print(file=echo)
    return response
