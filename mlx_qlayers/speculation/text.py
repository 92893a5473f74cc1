"""Text by guesses: the public function, and mlx-lm's own stream around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from ..decode.twin import rebound
from .drawing import Drawer

if TYPE_CHECKING:
    from .heads import Heads
    from .loop import Speculation
    from .rounds import SpeculationReport
    from .sources import Source


class SpeculativeText(Iterator[Any]):
    """The responses of a text as ``mlx_lm.stream_generate`` gives them.

    Attributes:
        report: what guesses were worth so far.
    """

    def __init__(self, responses: Iterator[Any], speculation: Speculation) -> None:
        self._responses, self.report = responses, speculation.report

    def __next__(self) -> Any:
        return next(self._responses)


def speculate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    *,
    draft_model: nn.Module | None = None,
    prompt_lookup: bool = True,
    heads: Heads | None = None,
    sources: Sequence[Source] = (),
    num_draft_tokens: int | None = None,
    measured: bool = True,
    max_tokens: int = 256,
    **options: Any,
) -> SpeculativeText:
    """Write text with guesses, which the model verifies several at a time.

    The text is what the model writes without guesses: the likeliest tokens are the same, and what
    is sampled is drawn by the model with the same random numbers, so the same seed gives the same
    text. Only rounding differs, as a step of several tokens is another product. Where guesses are
    not worth it there are none.

    Args:
        model: of mlx-lm, converted or not, with any caches.
        tokenizer: its tokenizer.
        prompt: text, or tokens (L,) as a list or an array.
        draft_model: a smaller model with the same tokens.
        prompt_lookup: whether guesses are what followed the last tokens where they stood before.
            Where they did not, the draft model guesses.
        heads: the model's heads for multi-token prediction, as :func:`load_heads` reads them. They
            guess where neither of these does.
        sources: more sources of guesses, asked after all of these.
        num_draft_tokens: guesses in a round at most, up to 15, which is the default.
        measured: whether their number is chosen by what rounds cost and how many guesses were
            right; else there are as many in every round.
        max_tokens: of the text.
        options: ``sampler``, ``logits_processors``, ``max_kv_size``, ``prompt_cache``,
            ``prefill_step_size``, ``kv_bits``, ``kv_group_size`` and ``quantized_kv_start`` of
            ``mlx_lm.generate_step``.

    Returns:
        An iterator of ``mlx_lm``'s ``GenerationResponse``, whose ``report`` says how many guesses
        were accepted, and how many tokens a second there were with and without.

    Raises:
        ValueError: ``num_draft_tokens`` is negative, ``max_tokens`` is 0, or the heads are of
            another model.
        TypeError: an option is none of these.

    Example:
        >>> from mlx_qlayers import load, speculate
        >>> model, tokenizer = load("models/tales-qwen2")
        >>> text = speculate(model, tokenizer, "Once upon a time", max_tokens=8)
        >>> print("".join(response.text for response in text))
        , and the cook said: 'I
        >>> print(text.report)
        guesses: ...

    Source:
        Leviathan et al., 2023, https://arxiv.org/abs/2211.17192; prompt look-up: Saxena, 2023,
        https://github.com/apoorvumang/prompt-lookup-decoding.
    """
    if num_draft_tokens is not None and num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be at least 0, not {num_draft_tokens}")
    from .loop import Speculation

    speculation = Speculation(draft_model, prompt_lookup, sources, measured, heads=heads)
    options |= {"num_draft_tokens": num_draft_tokens, "max_tokens": max_tokens}
    return SpeculativeText(stream(model, tokenizer, prompt, speculation, **options), speculation)


class SpeculativeBatch(NamedTuple):
    """Texts that were written together.

    Attributes:
        texts: behind their prompts.
        tokens: of these, with those that end them.
        report: what guesses were worth.
    """

    texts: list[str]
    tokens: list[list[int]]
    report: SpeculationReport


def speculate_batch(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    draft_model: nn.Module | None = None,
    prompt_lookup: bool = True,
    heads: Heads | None = None,
    num_draft_tokens: int | None = None,
    measured: bool = True,
    max_tokens: int = 256,
    sampler: Any = None,
    logits_processors: Any = None,
) -> SpeculativeBatch:
    """Write several texts together, each with as many accepted guesses in a step as are right.

    Args:
        model: of mlx-lm, whose caches know batches.
        tokenizer: its tokenizer.
        prompts: texts, or lists of tokens.
        draft_model, prompt_lookup, heads, num_draft_tokens, measured: as in :func:`speculate`. A
            draft model and heads guess for one text after the other.
        max_tokens: of each text.
        sampler, logits_processors: of all texts, each of which has random numbers of its own.

    Returns:
        The texts, their tokens, and a report.

    Raises:
        ValueError: the model has caches that know no batches, there is no prompt, or the heads are
            of another model.

    Example:
        >>> from mlx_qlayers import load, speculate_batch
        >>> model, tokenizer = load("models/tales-qwen2")
        >>> prompts = ["Once upon a time", "The king said"]
        >>> found = speculate_batch(model, tokenizer, prompts, max_tokens=8)
        >>> found.texts[0]
        ", and the cook said: 'I"

    Source:
        As :func:`speculate`.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from .loop import Speculation, batch, batch_caches
    from .rounds import Rounds
    from .sequence import Text

    if not prompts:
        raise ValueError("there is no prompt")
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    tokens = [tokenizer.encode(each) if isinstance(each, str) else [*each] for each in prompts]
    speculation = Speculation(draft_model, prompt_lookup, (), measured, heads=heads)
    seed = cast(int, mx.random.randint(0, 2**31 - 1).item())
    keys = mx.random.split(mx.random.key(seed), len(tokens))
    texts = [
        Text(each, Drawer(sampler, logits_processors, key), speculation.sources())
        for each, key in zip(tokens, keys, strict=True)
    ]
    trunk, depths = speculation.trunk(model), speculation.depths(model, num_draft_tokens)
    caches = batch_caches(model, tokens, trunk=trunk, texts=texts)
    run = Rounds(model, caches, texts, depths, trunk=trunk)
    run.report = speculation.report
    found = batch(run, tokenizer.eos_token_ids, max_tokens)
    ends = [each[: -(each[-1] in tokenizer.eos_token_ids) or None] for each in found]
    return SpeculativeBatch([*map(tokenizer.decode, ends)], found, speculation.report)


def stream(
    model: Any, tokenizer: Any, prompt: Any, speculation: Speculation, **options: Any
) -> Iterator[Any]:
    """``mlx_lm.stream_generate`` with this package's rounds in the place of its own."""
    from mlx_lm.generate import stream_generate as theirs
    from mlx_lm.models.cache import make_prompt_cache

    from .loop import speculative_generate_step

    names = {**theirs.__globals__, "speculative_generate_step": speculative_generate_step}
    if (size := options.get("max_kv_size")) and options.get("prompt_cache") is None:
        options["prompt_cache"] = make_prompt_cache(model, size)
    made: Any = rebound(theirs, names)
    found: Iterator[Any] = made(model, tokenizer, prompt, draft_model=speculation, **options)
    return found
