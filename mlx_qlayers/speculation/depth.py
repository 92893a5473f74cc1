"""How many guesses a round has: by what rounds cost here, and by how many guesses were right."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

# The lengths of steps, of which each is captured by itself.
LENGTHS = (2, 3, 5, 9, 16)
# The assumed worth of guesses behind a wrong and a right one before there were some, and for
# how many trials that counts.
_PRIOR, _WEIGHT = (0.6, 0.8), 2.0
_MEMORY = 0.9  # of trials, a round
# How far costs follow those that are lower, and higher: a step may wait for something, once.
_FALLS, _RISES = 0.5, 0.1
_ABOVE = 1.15  # costs so far above the line through a shorter length and none fall slowly
_DRIFT = 0.99  # of trials and costs, a token without guesses
# So many plain steps the capture of one takes at least, and where none was seen.
_CAPTURES = 10, 45
_COLD = 2  # the first step of a length is captured and compiled, and on a CPU the next one listed
# The share of the time that rounds may lose against steps without guesses.
_LOSS = 0.01


@dataclass
class Known:
    """Facts about a model that are kept: seconds by number of texts and source, and by length."""

    costs: dict[tuple[int, int | None], dict[int, float]] = field(default_factory=dict)
    runs: Counter[tuple[int, int | None, int]] = field(default_factory=Counter)  # by all of these
    capture: float = 0.0  # seconds of the first step of a length at most
    saved: float = 0.0  # seconds, by guesses, or could be, since there was a new length

    def save(self, seconds: float) -> None:
        """Take note of a gain, or a loss."""
        self.saved = max(self.saved + seconds, 0.0)


class Depths:
    """The choice of a depth, for some texts.

    A guess is right with one probability, b, behind one that was wrong, and with another, a, behind
    one that was right: what is looked up is right for long, or not at all. So a round of d guesses
    gives 1 + b * (1 + a + ... + a^(d - 1)) tokens, or with a in the place of b behind a round whose
    guesses were all right. It costs what rounds of its length did. Lengths that were not tried are
    taken to cost what lies between the others, and the next longer one what the line through the
    last two says. The losses of rounds against steps without guesses, less their gains, are added
    up, and past a hundredth of the time there are no rounds for a while. The texts of a batch have
    one depth, and add up.

    The first step of a length is captured and compiled, which takes as long as many steps. Sources
    that guess for nothing are asked without rounds, too, and the text says what was right. A
    new length waits until guesses have saved its capture, or would have.

    The cost of rounds of ``model`` is known from one text to the next. Unless the depth is
    ``measured``, it is ``most`` wherever there is room.
    """

    def __init__(self, model: Any, most: int, measured: bool = True) -> None:
        self.most, self.measured = most, measured
        if id(model) not in _known:
            weakref.finalize(model, _known.pop, id(model), None).atexit = False
        self.known = _known.setdefault(id(model), Known())
        # Right guesses and all, by their source and whether the one before was right.
        self.trials: dict[tuple[Hashable, bool], tuple[float, float]] = {}
        self.was_right: dict[tuple[Hashable, int], bool] = {}
        self.seconds = self.lost = 0.0

    def plain(self, texts: int) -> float | None:
        """The seconds of a step of one token of each text, without guesses."""
        return self.known.costs.get((texts, None), {}).get(1) or None

    def foretold(self, source: Hashable, text: int, texts: int, is_right: bool) -> None:
        """Note whether a source would have guessed a text's token, of a step without guesses."""
        self._count(source, self.was_right.get((source, text), False), is_right, 1)
        self.was_right[source, text] = is_right
        worth = (self.plain(texts) or 0.0) / texts / 2  # a round costs something, too
        self.known.save(worth if is_right else -worth)

    def acceptance(self, source: Hashable, was_right: bool) -> float:
        """The probability that a guess is right, behind one that was or was not."""
        right, count = self.trials.get((source, was_right), (0.0, 0.0))
        return (right + _PRIOR[was_right] * _WEIGHT) / (count + _WEIGHT)

    def depth(
        self, sources: Sequence[int | None], pending: int, most: int, waits: bool = False
    ) -> int:
        """The best number of guesses of each text's source, at most so many.

        The step takes ``pending`` tokens beside them. If it ``waits``, a new length is left until
        its capture was saved.
        """
        plain, most = self.plain(len(sources)), max(min(most, self.most), 0)
        if not self.measured:
            return most
        if plain is None or self.lost > _LOSS * self.seconds + plain or most < 1:
            return 0
        pairs = [
            (self.acceptance(s, self.was_right.get((s, i), False)), self.acceptance(s, True))
            for i, s in enumerate(sources)
            if s is not None
        ]
        known = self.known.costs.get((len(sources), _kind(sources)), {})
        cost = _cost({1: plain} | {n: c for n, c in known.items() if c})
        nearest = next((n for n in LENGTHS if n > max([*known, pending])), LENGTHS[-1])
        depths = {min(n - pending, most) for n in LENGTHS if pending < n <= nearest}
        capture = self.known.capture
        if capture < _CAPTURES[0] * plain:  # the first step was captured before
            capture = _CAPTURES[1] * plain
        if waits and self.known.saved < capture:
            there = {
                n for key, each in self.known.costs.items() if key[0] == len(sources) for n in each
            }
            depths = {d for d in depths if pending + d in there}
        gains = {d: sum(b * sum(a**i for i in range(d)) for b, a in pairs) for d in depths}
        rates = {d: (1 + gains[d] / len(sources)) / cost(pending + d) for d in depths}
        best = max(rates, key=rates.__getitem__, default=0)
        if best and rates[best] * plain > 1.0:
            return best
        for key in {(s, right) for s in sources for right in (False, True)}:
            self._count(*key, 0, 0, _DRIFT)
        for n, seconds in known.items():  # something else may have taken the time
            known[n] = seconds + (1 - _DRIFT) * min(plain - seconds, 0.0)
        return 0

    def record(
        self,
        sources: Sequence[int | None],
        length: int,
        guesses: Sequence[int],
        accepted: Sequence[int],
        seconds: float | None,
    ) -> None:
        """Take note of a round: how many guesses of each text's source there were, and right ones.

        ``seconds`` are those since the round before, if nothing else was done then.
        """
        texts, kind = len(sources), _kind(sources) if any(guesses) else None
        costs = self.known.costs.setdefault((texts, kind), {})
        self.known.runs[texts, kind, length] += 1
        runs, plain = self.known.runs[texts, kind, length], self.plain(texts)
        if runs == 1:
            costs[length] = self.known.saved = 0.0
            self.known.capture = max(self.known.capture, seconds or 0.0)
            seconds = None
        if seconds is not None and kind is not None and plain and runs <= _COLD:
            seconds = min(seconds, length * plain)
        elif seconds is not None:
            before = costs[length]
            follows = _RISES if seconds > before else _FALLS
            costs[length] = before + follows * (seconds - before) if before else seconds
        self.seconds += seconds or 0.0
        for i, (source, count, right) in enumerate(zip(sources, guesses, accepted, strict=True)):
            if count:
                tried, was_right = min(right + 1, count), self.was_right.get((source, i), False)
                self._count(source, was_right, min(right, 1), 1)
                self._count(source, True, max(right - 1, 0), tried - 1)
                self.was_right[source, i] = right == count
        if kind is not None and seconds is not None and plain:
            tokens = sum(accepted) / texts + 1
            self.known.save(tokens * plain - seconds)
            # A step waits once for, say, longer caches; one without guesses waits for them too.
            taken = min(seconds, 1.5 * costs[length]) if costs[length] else seconds
            self.lost += taken - tokens * plain
            slope = (costs[length] - plain) / (length - 1)
            for n in costs.keys() & {*range(length + 1, 2 * length + 1)} if slope > 0 else ():
                line = _ABOVE * (plain + slope * (n - 1))
                costs[n] += (1 - _MEMORY) / 2 * min(line - costs[n], 0.0)

    def _count(
        self, source: Hashable, was_right: bool, right: int, all_: int, memory: float = _MEMORY
    ) -> None:
        before = self.trials.get((source, was_right), (0.0, 0.0))
        self.trials[source, was_right] = memory * before[0] + right, memory * before[1] + all_


def _kind(sources: Sequence[int | None]) -> int | None:
    """The last of the sources, which takes longest."""
    return max((s for s in sources if s is not None), default=None)


def _cost(known: dict[int, float]) -> Callable[[int], float]:
    """The cost of a round of some length, from those that are known."""
    points = sorted(known.items())

    def cost(length: int) -> float:
        if length in known:
            return known[length]
        above = next((i for i, (n, _) in enumerate(points) if n > length), len(points))
        low, high = max(min(above, len(points) - 1) - 1, 0), min(above, len(points) - 1)
        (n, c), (m, e) = points[low], points[high]
        slope = max((e - c) / (m - n), 0.0) if m > n else 0.0
        return c + slope * (length - n)

    return cost


# The keys are identities, because models are dicts, which have no hash.
_known: dict[int, Known] = {}
