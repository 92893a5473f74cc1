"""Measures a model's shapes where the model is converted: each kernel beside the stock operator.

The kernels have the configuration of their heuristic; :mod:`.tune` searches for better ones. What
matters most comes first, and what the budget leaves out is measured at the next conversion. The
results are the tuner's: stored in its file, and used at once.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..dispatch.calls import CallProblem, ExpertsProblem, GatherProblem, RouterProblem
from ..dispatch.entries import Entry, adopted, file_of, own_entries, parsed
from ..dispatch.measurements import Question, lookup, questions
from ..dispatch.problem import (
    CALIBRATED_KEYS,
    CALIBRATED_PROMPTS,
    CALIBRATED_ROWS,
    Problem,
)
from ..dispatch.products import QmmProblem, QmvProblem
from ..dispatch.tunable import (
    AttentionDecodeProblem,
    AttentionForwardProblem,
    AttentionStepProblem,
)
from ..formats import Format
from ..runtime.backend import advance_epoch, backend, epoch, requested
from ..runtime.cuda_ahead import nothing_compiled
from ..runtime.explain import note, recording, significant
from ..runtime.ranks import gathered
from .families import FAMILIES
from .measuring import results
from .problems import Target, asked_by, problems_of
from .store import exclusive, save

# Set to 0 it leaves calibration out.
_ENVIRONMENT = "MLX_QLAYERS_CALIBRATE"
BUDGET = 5.0
# Tokens side by side and of a prompt, and keys of a cache, with what each counts for: most people
# decode one sequence.
_ROWS = dict(zip(CALIBRATED_ROWS, (1.0, 0.2, 0.25, 0.3, 0.2), strict=True))
_PROMPTS = dict(zip(CALIBRATED_PROMPTS, (0.15, 0.3, 0.2), strict=True))
_KEYS = dict(zip(CALIBRATED_KEYS, (0.5, 1.0, 0.5, 0.2), strict=True))
# On CUDA MLX compiles its own products of more rows for half a minute.
_STOCK_ROWS_ON_CUDA = 4
# Keys of the token whose time is reported, and sequences that attend to no more.
_SHORT, _BATCH = 1024, 8
# Bytes of a problem that is measured: a conversion has little more memory than the model.
_LARGEST = 1 << 30
# Seconds between two writes of what was measured, and the share of the budget for the last one.
_SAVE, _STORING = 1.0, 0.03


@dataclass(frozen=True)
class Measured:
    """A problem of a model, and what was measured of it.

    Attributes:
        problem: what the kernel is asked for.
        count: how often it is, for one token.
        path: the one that is taken: ``"kernel"``, ``"stock"``, or another kernel's.
        seconds: of each.
    """

    problem: Problem
    count: int
    path: str
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Calibration:
    """What is known of a model's problems on this device.

    Attributes:
        measured: those that were measured here, now or before.
        left: how many were left out for want of time.
        seconds: what this calibration took.
    """

    measured: tuple[Measured, ...] = ()
    left: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line for reports: what was measured, what is taken, and what that gains a token."""
        if not self.measured:
            return ""
        total, kernels = len(self.measured), sum(m.path != "stock" for m in self.measured)
        token = [m for m in self.measured if _is_of_token(m.problem) and len(m.seconds) > 1]
        stock = 1e3 * sum(m.count * m.seconds["stock"] for m in token)
        taken = 1e3 * sum(m.count * m.seconds[m.path] for m in token)
        text = f"measured here: kernels for {kernels} of {total} shapes"
        if token:
            text += f", which take {significant(taken)} ms of a token"
            text += f" in place of {significant(stock)} ms"
        text += f"; measured for {self.seconds:.1f} s" if self.seconds else ""
        return text + (f"; {self.left} left to the next conversion" if self.left else "")


def calibrate(
    model: nn.Module, budget_s: float = BUDGET, *, group: mx.distributed.Group | None = None
) -> Calibration:
    """Measure what a converted model asks of kernels here and nobody has measured yet.

    Every kernel is verified before its time counts. It is taken where it is at least 3% faster than
    the stock operator, by times that leave no doubt; ties go to stock.

    Args:
        model: a converted model.
        budget_s: seconds in which all is done; no measurement begins that would take longer if it
            took as long as the one before. On CUDA nothing is waited for after that either: what
            is still being compiled is measured at the next conversion.
        group: ranks that share the model and all make this call. Rank 0 measures, and the others
            take all of its results in the place of their own.

    Returns:
        What is known now. Nothing is measured where a backend was forced, where there are no
        kernels, in debug modes, or where ``MLX_QLAYERS_CALIBRATE`` is 0.

    Example:
        >>> calibrate(nn.Linear(64, 32)).measured  # asks for nothing that could be measured
        ()
    """
    start = time.monotonic()
    name = None if requested() != "auto" or epoch.debug else file_of(backend())
    off = name is None or os.environ.get(_ENVIRONMENT) == "0"
    if (group and any(gathered(group, "off" if off else ""))) or off or name is None:
        return Calibration()
    notes: list[tuple[str, str]] = []
    with recording(), _same_random_state():  # what is measured is no call of the user's
        values = _valued(model)
        missing = [target for target in values if lookup(target.problem, name) is None]
        missing = [] if _is_shipped(values, name) or (group and group.rank()) else missing
        left = 0
        if missing:
            with exclusive(name, budget_s) as alone:
                # Meanwhile another process may have measured some of them.
                missing = [t for t in missing if lookup(t.problem, name) is None]
                left = len(missing)
                if alone:
                    deadline = start + (1 - _STORING) * budget_s
                    left -= _measure(name, missing, deadline, notes)
        if group is not None:
            _adopt(name, group)
        known = {target: lookup(target.problem, name) for target in values}
    for path, reason in notes:
        note("calibration", path, reason)
    measured = tuple(
        Measured(target.problem, values[target][1], best.path, seconds)
        for target, best in known.items()
        if best is not None
        and best.evidence.source == "measured here"
        and best.path in (seconds := best.evidence.seconds or {})
    )
    return Calibration(measured, left, time.monotonic() - start if missing else 0.0)


def _adopt(name: str, group: mx.distributed.Group) -> None:
    """Take rank 0's results for a device, so that all ranks run the same kernels."""
    rank = group.rank()
    own = {} if rank else {key: asdict(entry) for key, entry in own_entries(name).items()}
    results = json.loads(gathered(group, json.dumps(own))[0])
    if rank:
        adopted[name] = {key: parsed(value) for key, value in results.items()}
        advance_epoch()


def _measure(
    name: str, missing: list[Target], deadline: float, notes: list[tuple[str, str]]
) -> int:
    """Measure problems until the deadline, and store what comes; of how many something did."""
    from tqdm import tqdm

    done: dict[str, Entry] = {}
    count, saved, measured = 0, time.monotonic(), results(missing, deadline)
    bar = tqdm(total=len(missing), desc="measuring here", delay=1, disable=None, leave=False)
    try:
        for key, entry, said, lost in measured:
            notes += [said] if said else []
            if entry is not None:
                done[key] = entry
            count += bool(key)
            bar.update()
            if lost:
                raise RuntimeError(
                    f"{key}: {lost}; with MLX_QLAYERS_CALIBRATE=0 nothing is "
                    "measured, and the next conversion leaves this kernel out"
                )
            if time.monotonic() > saved + _SAVE and done:
                save(name, done)
                done, saved = {}, time.monotonic()
    finally:
        bar.close()
        if done:
            save(name, done)
    return count


def _is_shipped(values: Iterable[Target], name: str) -> bool:
    """Whether this model was tuned on such a device for the package: all products of a token."""
    token = [t.problem for t in values if isinstance(t.problem, QmvProblem) and t.problem.rows == 1]
    found = [lookup(problem, name) for problem in token]
    return bool(found) and all(b and b.evidence.source == "shipped result" for b in found)


def _valued(model: nn.Module) -> dict[Target, tuple[float, int]]:
    """What a model asks, the most valuable first: with bytes times layers, and how often."""
    layers = len(getattr(model, "layers", ())) or 1
    matrices = Counter(filter(None, map(_shape, model.modules())))
    values: dict[Target, tuple[float, int]] = {}
    for problem in _problems(model):
        target = problem.problem
        count = layers
        if isinstance(target, QmvProblem | QmmProblem) and not getattr(target, "kind", ""):
            count = matrices.get((target.n, target.k), layers)
        values[problem] = count * _bytes(target) * _weight(target), count
    return dict(sorted(values.items(), key=lambda item: -item[1][0]))


def _problems(model: nn.Module) -> Iterator[Target]:
    """The problems of decoding and of prompts, at the sizes that are measured."""
    with questions() as asked, nothing_compiled():
        if not asked_by(model):
            asked |= dict.fromkeys(_products(model))
        elif backend() != "host":  # which computes a prompt as rows, sixteen after sixteen
            asked_by(model, prompt=CALIBRATED_PROMPTS[-1])
    found = (other for question in asked for other in _at_sizes(*question))
    for target in problems_of(found, searched=False):
        if _weight(target.problem) and _is_measurable(target.problem):
            yield target


def _at_sizes(family: str, given: tuple[Any, ...]) -> Iterator[Question]:
    """A question about one token or one prompt, with each number of rows, tokens or keys."""
    match family:
        case "qmv":
            yield from ((family, (rows, *given[1:])) for rows in CALIBRATED_ROWS)
        case "qmm":
            yield from ((family, (tokens, *given[1:])) for tokens in CALIBRATED_PROMPTS)
        case "attention_decode":
            yield from ((family, (*given[:-1], keys)) for keys in CALIBRATED_KEYS)
            yield family, (*given[:5], given[5] * _BATCH, _SHORT)
        case "attention_step":
            yield from ((family, (*given[:4], keys, *given[5:])) for keys in CALIBRATED_KEYS)
            yield family, (given[0], _BATCH, *given[2:4], _SHORT, *given[5:])
        case "attention_forward":
            shape, *rest = given
            for tokens in CALIBRATED_PROMPTS:
                yield family, ((*shape[:3], tokens, tokens, *shape[5:]), *rest)
        case "experts" | "gather_qmm" | "router" | "latent_attention":
            problem = FAMILIES[family].problem(*given)
            for size in problem.calibrated:
                yield family, (problem.at(size).sizes, *given[1:])


def _is_measurable(problem: Problem) -> bool:
    """Whether the stock operator can be timed beside it within seconds."""
    if _bytes(problem) > _LARGEST:
        return False
    if backend() != "cuda":
        return True
    if isinstance(problem, QmvProblem):
        return problem.rows <= _STOCK_ROWS_ON_CUDA and problem.dtype != mx.float32
    return isinstance(problem, AttentionDecodeProblem | AttentionStepProblem)


def _products(model: nn.Module) -> Iterator[Question]:
    """Those of a model that is no language model of mlx-lm: each of its matrices alone."""
    for module in model.modules():
        if (shape := _shape(module)) is not None:
            scales, fmt = module["scales"], Format(module.group_size, module.bits, module.mode)
            dtype = scales.dtype if module.get("biases") is not None else mx.bfloat16
            yield "qmv", (1, *shape, dtype, fmt)


def _shape(module: Any) -> tuple[int, int] | None:
    """N and K of a module's quantized matrix."""
    if "scales" not in module or module["weight"].ndim != 2:
        return None
    return module["weight"].shape[0], module["scales"].shape[1] * module.group_size


def _weight(problem: Problem) -> float:
    """What a problem counts for by its rows or length; 0 if it is not to be measured."""
    match problem:
        case QmvProblem():
            return _ROWS.get(problem.rows, 0.0)
        case QmmProblem():
            return _PROMPTS.get(problem.bucket()[0][0], 0.0)
        case AttentionDecodeProblem():
            return _KEYS.get(problem.keys, 0.0)
        case AttentionStepProblem():
            return _KEYS.get(problem.size, 0.0) / problem.batch
        case AttentionForwardProblem():
            return _PROMPTS.get(problem.shape[3], 0.0)
        case GatherProblem():
            return _PROMPTS[CALIBRATED_PROMPTS[-1]]
        case CallProblem() if problem.is_launched:
            return (_ROWS | _KEYS).get(problem.sizes[0], 0.0)
    return 0.0


def _bytes(problem: Problem) -> float:
    """What it reads at least."""
    match problem:
        case QmvProblem() | QmmProblem():
            group, bits, _ = problem.fmt
            return problem.n * problem.k * (bits + 32 / group) / 8
        case AttentionDecodeProblem():
            bits = problem.bits or 8 * problem.dtype.size
            return problem.caches * problem.keys * (problem.width + problem.v_width) * bits / 8
        case AttentionStepProblem():
            widths = problem.width + problem.v_width
            return problem.batch * problem.kv_heads * problem.size * widths * problem.dtype.size
        case AttentionForwardProblem():
            batch, _, kv_heads, _, keys, width, v_width = problem.shape
            return batch * kv_heads * keys * (width + v_width) * problem.dtype.size
        case CallProblem():
            return problem.bytes()
    return 0.0


def _is_of_token(problem: Problem) -> bool:
    """Whether it is part of a token of one sequence with a short text behind it."""
    match problem:
        case QmvProblem():
            return problem.rows == 1
        case AttentionDecodeProblem():
            return problem.keys == _SHORT
        case AttentionStepProblem():
            return (problem.size, problem.batch) == (_SHORT, 1)
        case ExpertsProblem() | RouterProblem():
            return problem.sizes[0] == 1
    return False


@contextmanager
def _same_random_state() -> Iterator[None]:
    """The caller's random numbers stay what they would have been."""
    state: Any = mx.random.state
    before = [mx.array(each) for each in state]
    mx.eval(before)
    try:
        yield
    finally:
        for each, value in zip(state, before, strict=True):
            each[:] = value
