"""The loop of rounds as a generator, and that of a batch.

The first takes the place of ``mlx_lm.generate.speculative_generate_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..decode.engine import MAX_LENGTH
from ..decode.quantized_caches import maybe_quantize_kv_cache
from .depth import Depths
from .drawing import Drawer, Processor, Sampler
from .heads import Heads, PredictionHeads, Trunk
from .rounds import Rounds, SpeculationReport
from .sequence import Text
from .sources import DraftModel, PromptLookup, Source


def speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: nn.Module | Speculation,
    stream: Any = generation_stream,
    *,
    num_draft_tokens: int | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[Processor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
) -> Generator[tuple[int, mx.array, bool]]:
    """Generate as ``mlx_lm.generate.speculative_generate_step``, with any source and any caches.

    ``draft_model`` is a smaller one, whose caches come behind those of the model, or where guesses
    come from; ``num_draft_tokens`` are guesses in a round at most, by default as many as are worth
    it. All else is as in ``mlx_lm.generate_step``. It yields a token, its log-probabilities
    (vocabulary,), and whether it was guessed.
    """
    caches = make_prompt_cache(model, max_kv_size)
    given = [*(prompt_cache or ())]
    if given:
        caches, given = given[: len(caches)], given[len(caches) :]
    speculation = Speculation(draft_model) if isinstance(draft_model, nn.Module) else draft_model
    names = ("kv_bits", "kv_group_size", "quantized_kv_start")
    quantize = dict(zip(names, (kv_bits, kv_group_size, quantized_kv_start), strict=True))
    with mx.stream(stream):
        sources = speculation.sources(given or None, prefill_step_size)
        drawer, tokens = Drawer(sampler, logits_processors), cast(list[int], prompt.tolist())
        text, trunk = Text(tokens, drawer, sources), speculation.trunk(model)
        observe = partial(_observed, [text]) if trunk else None
        _prefill(trunk or model, caches, prompt[None, :-1], prefill_step_size, quantize, observe)
        depths = speculation.depths(model, num_draft_tokens)
        run = Rounds(model, caches, [text], depths, quantize, trunk)
        run.report = speculation.report
        yield from texts(run, max_tokens, prompt_cache is not None)
        if prompt_cache is not None:  # caches may have been quantized
            prompt_cache[: len(caches)] = caches


def texts(run: Rounds, max_tokens: int, is_kept: bool) -> Generator[tuple[int, mx.array, bool]]:
    """The tokens of all rounds; behind them caches that somebody has hold what was taken."""
    tic, flight, count = perf_counter(), run.next(), 0
    while count != max_tokens:
        ahead = run.behind(flight)
        (new,), taken = run.read(flight), 0
        run.record(flight, [new], perf_counter() - tic, ahead)
        try:
            for token in new[: None if max_tokens < 0 else max_tokens - count]:
                taken += 1
                yield token, flight.drawn[0].logprobs[taken - 1], taken < len(new)
        except GeneratorExit:
            max_tokens = count + taken
        tic = perf_counter()
        run.settle(flight, [new], [taken])
        count += taken
        if ahead is not None and ahead.checkpoint is None:
            run.asked()  # guesses that there are now come behind the step under way
        if count != max_tokens:
            flight = ahead or run.next()
    if is_kept:
        run.finish(ahead)


def batch(run: Rounds, ends: Collection[int], max_tokens: int) -> list[list[int]]:
    """The new tokens of all texts, up to the first of some that end them, or so many of each."""
    found = [list[int]() for _ in run.texts]
    there, over = [*range(len(found))], False
    tic, flight = perf_counter(), run.next()
    while there:
        ahead = run.behind(flight) if flight.checkpoint is None and not over else None
        new = run.read(flight)
        run.record(flight, new, perf_counter() - tic, ahead)
        tic, taken = perf_counter(), list[int]()
        for i, tokens in zip(there, new, strict=True):
            end = next((n for n, token in enumerate(tokens, 1) if token in ends), len(tokens))
            taken.append(
                0 if _is_over(found[i], ends, max_tokens) else min(end, max_tokens - len(found[i]))
            )
            found[i] += tokens[: taken[-1]]
        run.settle(flight, new, taken)
        left = [n for n, i in enumerate(there) if not _is_over(found[i], ends, max_tokens)]
        over = len(left) < len(there)
        if ahead is not None:  # all texts have taken its step, also those that are over
            run.asked()
            flight = ahead
            continue
        if over:
            run.keep(left) if left else None
            there, over = [there[n] for n in left], False
        flight = run.next() if there else flight
    return found


def _is_over(text: list[int], ends: Collection[int], max_tokens: int) -> bool:
    return len(text) >= max_tokens or (bool(text) and text[-1] in ends)


def batch_caches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    chunk: int = 2048,
    trunk: Trunk | None = None,
    texts: Sequence[Text] = (),
) -> list[Any]:
    """The caches of prompts of any lengths, behind all of each but its last token.

    The ``trunk`` is the model, where sources of ``texts`` are to see its hidden states. Caches that
    know no batches raise a ValueError.
    """
    each = [make_prompt_cache(model) for _ in prompts]
    if not all(hasattr(c, "merge") for c in each[0]):
        raise ValueError("the model has caches that know no batches")
    caches = [c[0].merge([*c]) for c in zip(*each, strict=True)]
    lengths = [len(prompt) - 1 for prompt in prompts]
    longest = max(lengths)
    padding = [longest - n for n in lengths]
    if max(padding):
        for c in caches:
            c.prepare(lengths=lengths, right_padding=padding)
    rows = [[*prompt[:-1], *[0] * n] for prompt, n in zip(prompts, padding, strict=True)]
    observe = partial(_observed, texts) if trunk else None
    _prefill(trunk or model, caches, mx.array(rows, mx.uint32), chunk, {"kv_bits": None}, observe)
    if max(padding):
        for c in caches:
            c.finalize()
    return caches


def _prefill(
    model: Any,
    caches: list[Any],
    prompts: mx.array,
    chunk: int,
    quantize: dict[str, Any],
    observe: Callable[[int, mx.array], None] | None = None,
) -> None:
    for start in range(0, prompts.shape[1], chunk):
        tokens = prompts[:, start : start + chunk]
        if observe is None:
            model(tokens, cache=caches)
        else:
            observe(start, model.tapped.hidden(tokens, caches))
        if quantize["kv_bits"] is not None:
            maybe_quantize_kv_cache(caches, **quantize)
        mx.eval([c.state for c in caches])
        mx.clear_cache()


def _observed(texts: Sequence[Text], start: int, hidden: mx.array) -> None:
    """Show each text the hidden states of its prompt, without its last token and the padding."""
    for text, rows in zip(texts, hidden, strict=True):
        if (count := min(len(text.tokens) - 1 - start, len(rows))) > 0:
            text.observe(start, rows[:count])


class Speculation:
    """Where the guesses of a text come from, in this order, and what they were worth.

    From text that was written before, or in ``history`` (``prompt_lookup``); from a smaller model,
    the ``draft``; from the model's ``heads``; from ``others``. :class:`Depths` says ``measured``.
    """

    def __init__(
        self,
        draft: nn.Module | None = None,
        prompt_lookup: bool = False,
        others: Sequence[Source] = (),
        measured: bool = True,
        history: Sequence[int] = (),
        heads: Heads | None = None,
    ) -> None:
        self.draft, self.prompt_lookup, self.others = draft, prompt_lookup, others
        self.measured, self.history, self.heads = measured, history, heads
        self.report = SpeculationReport()

    def depths(self, model: Any, most: int | None) -> Depths:
        """The choice of how many guesses a round has, at most so many."""
        most = min(MAX_LENGTH if most is None else most, MAX_LENGTH - 1)
        return Depths(model, most, self.measured)

    def trunk(self, model: nn.Module) -> Trunk | None:
        """The model, if heads are to see its hidden states."""
        return None if self.heads is None else self.heads.of(model)

    def sources(self, caches: list[Any] | None = None, chunk: int = 2048) -> list[Source]:
        """New ones for a text, of which a draft model may have caches."""
        found: list[Source] = [PromptLookup(self.history)] if self.prompt_lookup else []
        if self.draft is not None:
            found.append(DraftModel(self.draft, caches, chunk))
        if self.heads is not None:
            found.append(PredictionHeads(self.heads))
        return [*found, *self.others]
