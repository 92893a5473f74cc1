"""Rounds: the last tokens and guesses in one step, and what of it counts, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..decode.engine import MAX_LENGTH
from ..decode.quantized_caches import maybe_quantize_kv_cache
from .depth import Depths
from .drawing import Drawn, accepted
from .heads import Trunk
from .rollback import Checkpoint, longest
from .sequence import Text
from .sources import Foreteller, Pipelined


@dataclass
class SpeculationReport:
    """The worth of guesses in a text.

    Attributes:
        tokens: of the text, behind the prompt.
        rounds: steps with guesses; ``steps`` are all.
        guesses: in all rounds; ``accepted`` of them were right.
        lengths: how many rounds had 0, 1, ... accepted guesses.
        seconds: behind the prompt.
        plain_seconds: of a step without guesses, as measured in between; None if there was none.
    """

    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    guesses: int = 0
    accepted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)
    seconds: float = 0.0
    plain_seconds: float | None = None

    def __str__(self) -> str:
        of_round = f"{self.accepted / self.rounds:.2f}" if self.rounds else "0"
        speed = f"{self.tokens / self.seconds:.1f}" if self.seconds else "no"
        without = f"{1 / self.plain_seconds:.1f} without" if self.plain_seconds else "not measured"
        return (
            f"guesses: {self.accepted} of {self.guesses} accepted in {self.rounds} rounds, "
            f"{of_round} a round; {speed} tokens/s with guesses, {without}"
        )


class Flight(NamedTuple):
    """A step that was launched."""

    fed: mx.array  # (B, L) its tokens
    before: list[mx.array | None]  # all tokens before these of each text, if there are processors
    known: list[int]  # how many of the tokens of each text are no guesses
    guesses: list[int]  # how many are; `sources` are where they come from
    sources: list[int | None]
    checkpoint: Checkpoint | None  # what caches were before, if tokens may be dropped
    drawn: list[Drawn]  # what each text's tokens may go on with
    found: mx.array  # (B, 1 + tokens): accepted guesses, and all that was drawn; else that alone
    hidden: mx.array | None = None  # (B, L, D) states behind the logits, where the model gives them
    launch: float = 0.0  # its seconds, if it was behind another step; on a CPU all of them


class Rounds:
    """The rounds of some texts, with the caches of a batch where there are several.

    ``quantize`` are options of ``maybe_quantize_kv_cache`` by name. The ``trunk`` is the model,
    where a source is to see its hidden states.
    """

    def __init__(
        self,
        model: Any,
        caches: list[Any],
        texts: Sequence[Text],
        depths: Depths,
        quantize: dict[str, Any] | None = None,
        trunk: Trunk | None = None,
    ) -> None:
        self.model, self.caches, self.texts, self.depths = model, caches, [*texts], depths
        self.trunk = trunk
        self.quantize, self.report = quantize or {"kv_bits": None}, SpeculationReport()
        self.goes_ahead = False

    def next(self) -> Flight:
        """Launch the step behind all tokens so far, with guesses if they are worth it."""
        sources, length = self.asked()
        pairs = [*zip(self.texts, sources, strict=True)]
        fed, guesses = zip(*(text.fed(source, length) for text, source in pairs), strict=True)
        before = [text.before() for text in self.texts]
        known = [len(text.pending) for text in self.texts]
        return self._launched(mx.stack([*fed]), before, known, [*guesses], sources)

    def behind(self, flight: Flight) -> Flight | None:
        """Launch the next step before the tokens of one are known here; None if it has to wait."""
        if flight.checkpoint is not None:
            return self._round_behind(flight)
        if not self.goes_ahead:
            return None
        start = perf_counter()
        pairs = zip(flight.before, flight.fed, strict=True)
        before = [None if b is None else mx.concatenate([b, fed]) for b, fed in pairs]
        nothing = [0] * len(before)
        known, sources = [1] * len(before), [None for _ in before]
        fed = flight.found.astype(mx.uint32)
        found = self._launched(fed, before, known, nothing, [*sources])
        return found._replace(launch=perf_counter() - start)

    def _round_behind(self, flight: Flight) -> Flight | None:
        """The next round of one text, whose source guesses behind what is not known here yet."""
        start, text, checkpoint = perf_counter(), self.texts[0], flight.checkpoint
        if (
            flight.sources != [0]
            or not isinstance(text.sources[0], Pipelined)
            or flight.known != [1]
            or flight.guesses != [flight.fed.shape[1] - 1]
            or self.trunk is not None
            or text.drawer.processors
            or self._is_to_quantize()
        ):
            return None
        sources, length = self.asked()
        right = flight.found[0, 0]
        left = flight.guesses[0] - right
        if length == 1 or checkpoint is None or not checkpoint.moves_back(left, length):
            return None
        keys = flight.drawn[0].keys
        key = mx.stack(keys)[right] if keys else text.drawer.key()
        text.drawer.keep(key)
        last = mx.stack([flight.fed[0, right], flight.found[0, 1 + right].astype(mx.uint32)])
        if (fed := text.fed_behind(last, right, length)) is None:
            return None
        found = self._launched(fed[None], [None], [1], [length - 1], sources)
        if found.checkpoint is not None and not found.checkpoint.is_by_a_graph():
            text.drawer.keep(key)
            return None
        return found._replace(launch=perf_counter() - start)

    def asked(self) -> tuple[list[int | None], int]:
        """Which source is to guess for each text, and how many tokens a step has."""
        least = max(len(text.pending) for text in self.texts)
        sources = [text.ready() for text in self.texts]
        depth = 0
        if any(source is not None for source in sources):
            waits = all(
                isinstance(text.sources[source], Foreteller)
                for text, source in zip(self.texts, sources, strict=True)
                if source is not None
            )
            depth = self.depths.depth(sources, least, self._room() - least, waits)
        self.goes_ahead = not depth
        return (sources if depth else [None] * len(sources)), least + depth

    def _room(self) -> int:
        """How many tokens a step can have, as caches treat all of them like the first."""
        room = min(longest(self.model, self.caches) or MAX_LENGTH, MAX_LENGTH)
        if not self._is_to_quantize():
            return room
        start = self.quantize["quantized_kv_start"]
        left = [start - c.offset for c in self.caches if hasattr(c, "to_quantized")]
        return min([room, *(n for n in left if n > 0)])

    def _is_to_quantize(self) -> bool:
        """Whether caches are still to be quantized."""
        return self.quantize["kv_bits"] is not None and any(
            hasattr(c, "to_quantized") for c in self.caches
        )

    def _launched(
        self,
        fed: mx.array,
        before: list[mx.array | None],
        known: list[int],
        guesses: list[int],
        sources: list[int | None],
    ) -> Flight:
        if self.quantize["kv_bits"] is not None:
            maybe_quantize_kv_cache(self.caches, **self.quantize)
        length, first = fed.shape[1], min(known) - 1
        drops = length > first + 1
        model = self.trunk.tapped if self.trunk else self.model
        checkpoint = Checkpoint(model, self.caches, length) if drops else None
        logits, hidden = model(fed, cache=self.caches), None
        if self.trunk:
            logits, hidden = self.trunk.parts(logits)
        drawn = self._drawn(logits[:, first:], before, fed, known)
        found = mx.stack([each.tokens for each in drawn]).astype(mx.int32)
        if drops:
            ahead = mx.array([n - first - 1 for n in known])
            counts = accepted(found, fed[:, first + 1 :]) - ahead
            found = mx.concatenate([counts[:, None], found], axis=1)
        mx.async_eval(found)
        return Flight(fed, before, known, guesses, sources, checkpoint, drawn, found, hidden)

    def _drawn(
        self, logits: mx.array, before: list[mx.array | None], fed: mx.array, known: list[int]
    ) -> list[Drawn]:
        """The tokens of each text; where it has more known ones than others, these themselves."""
        found, rows = list[Drawn](), logits.shape[1]
        if (
            len(known) > 1
            and max(known) == min(known)
            and all(t.drawer.at_once for t in self.texts)
        ):
            drawn = self.texts[0].drawer(logits, None, fed)
            return [Drawn(*each, []) for each in zip(drawn.tokens, drawn.logprobs, strict=True)]
        for text, own, b, row, n in zip(self.texts, logits, before, fed, known, strict=True):
            ahead = n - 1 - (fed.shape[1] - rows)
            drawn = text.drawer(own[ahead:], b, row)
            if ahead:
                tokens = [row[n - ahead : n].astype(drawn.tokens.dtype), drawn.tokens]
                drawn = drawn._replace(tokens=mx.concatenate(tokens))
            found.append(drawn)
        return found

    def read(self, flight: Flight) -> list[list[int]]:
        """The new tokens of each text; random numbers go on behind the last of them."""
        found, new = cast(list[list[int]], flight.found.tolist()), list[list[int]]()
        self.report.steps += 1
        self.report.rounds += any(flight.guesses)
        for i, row in enumerate(found):
            count, tokens = (row[0], row[1:]) if flight.checkpoint else (0, row)
            tokens = tokens[flight.known[i] - min(flight.known) :]
            count = min(count, flight.guesses[i])  # behind guesses are zeros, which may be right
            moved = flight.checkpoint is not None and flight.checkpoint.gone is not None
            if (keys := flight.drawn[i].keys) and count + 1 < len(keys) and not moved:
                self.texts[i].drawer.keep(keys[count])
            if flight.guesses[i]:
                self.report.guesses += flight.guesses[i]
                self.report.accepted += count
                self.report.lengths[count] += 1
            new.append(tokens[: count + 1])
        return new

    def record(
        self,
        flight: Flight,
        new: list[list[int]],
        seconds: float | None,
        ahead: Flight | None = None,
    ) -> None:
        """Note the seconds since the step before was read, if known, and what guesses were right.

        ``ahead`` is the step behind it, if that was launched in that time.
        """
        if seconds is not None:
            seconds += flight.launch - (ahead.launch if ahead else 0.0)
        right = [len(each) - 1 for each in new]
        self.depths.record(flight.sources, flight.fed.shape[1], flight.guesses, right, seconds)
        self.report.seconds += seconds or 0.0
        self.report.plain_seconds = self.depths.plain(len(new))

    def settle(self, flight: Flight, new: list[list[int]], taken: list[int]) -> None:
        """Caches go back to what was taken of a step's new tokens; what they lack is pending."""
        length, checkpoint = flight.fed.shape[1], flight.checkpoint
        right = [min(n, len(each) - 1) for n, each in zip(taken, new, strict=True)]
        rejected = [length - n - r for n, r in zip(flight.known, right, strict=True)]
        dropped = checkpoint.back(rejected) if checkpoint else [0] * len(new)
        for i, text in enumerate(self.texts):
            held, start = text.pending + new[i][: right[i]], len(text.tokens) - len(text.pending)
            text.pending = held[length - dropped[i] :] + new[i][right[i] : taken[i]]
            text.tokens += new[i][: taken[i]]
            if any(flight.guesses):
                text.foretold = []
            elif taken[i] and (said := text.follow()) is not None:
                self.depths.foretold(said[0], i, len(new), said[1])
            if flight.hidden is not None:
                text.observe(start, flight.hidden[i, : flight.known[i] + right[i]])
            self.report.tokens += taken[i]

    def keep(self, texts: Sequence[int], flight: Flight | None = None) -> Flight | None:
        """Go on with some of the texts of a batch alone, and with a step without guesses."""
        self.texts, rows = [self.texts[i] for i in texts], mx.array([*texts])
        for c in self.caches:
            c.filter(rows)
        if flight is None:
            return None
        kept: dict[str, Any] = {
            name: value[rows] if isinstance(value, mx.array) else [value[i] for i in texts]
            for name, value in flight._asdict().items()
            if isinstance(value, mx.array | list)
        }
        return flight._replace(**kept)

    def finish(self, ahead: Flight | None) -> None:
        """Let all caches hold all tokens of a text, as they do behind ``mlx_lm.generate_step``."""
        (text,) = self.texts
        if ahead is not None and ahead.checkpoint is not None:
            ahead.checkpoint.back([ahead.fed.shape[1]])
            ahead = None
        if text.pending and ahead is None:
            self.model(mx.array([text.pending], mx.uint32), cache=self.caches)
        for source in text.sources:
            source.finish(text.tokens)
