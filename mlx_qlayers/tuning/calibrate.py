"""Measures a model's shapes where the model is converted: each kernel beside the stock operator.

The kernels have the configuration of their heuristic; :mod:`.tune` searches for better ones. A
token comes first, then several at once, then prompts; what the budget leaves out is measured at
the next conversion. The results are the tuner's: stored in its file, and used at once.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..dispatch.measurements import collected_records, lookup
from ..formats import Format
from ..measurements.entries import COMPUTED, Entry, adopted, file_of, own_entries, parsed, raw
from ..measurements.store import exclusive, save
from ..metal.quantized_matmul.records import QmvRecord
from ..metal.record import CALIBRATED_KEYS, CALIBRATED_PROMPTS, LARGEST, Record
from ..runtime.backend import advance_epoch, backend, epoch, requested
from ..runtime.cuda_ahead import nothing_compiled
from ..runtime.devices import device_of
from ..runtime.explain import note, recording, significant
from ..runtime.ranks import gathered
from .measuring import Result, results
from .model_records import asked_by, records_of

# Set to 0 it leaves calibration out.
_ENVIRONMENT = "MLX_QLAYERS_CALIBRATE"
BUDGET = 5.9
# Keys of the token whose time is reported.
_SHORT = CALIBRATED_KEYS[0]
# The share of the budget that a prompt may take.
_SHARE = 0.14
# Seconds between two writes of what was measured, and the share of the budget for the last one.
_SAVE, _STORING = 1.0, 0.03


@dataclass(frozen=True)
class Measured:
    """A record of a model, and its measurement."""

    record: Record  # what the kernel is asked for
    count: int  # how often it is, for one token
    path: str  # the one that is taken: `"kernel"`, `"stock"`, or another kernel's
    seconds: Mapping[str, float]  # of each


@dataclass(frozen=True)
class Calibration:
    """The measurements known of a model's kernels on this device.

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
        token = [m for m in self.measured if m.record.stage == 0 and m.record.size <= _SHORT]
        token = [m for m in token if len(m.seconds) > 1]
        # Attention counts once: by the whole step, where there is one, else alone.
        is_whole = any(m.record.family == "attention_step" for m in token)
        alone = -1 if is_whole else _SHORT
        token = [
            m for m in token if m.record.family != "attention_decode" or m.record.size == alone
        ]
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
        budget_s: seconds after which a measurement that is under way is left to the next
            conversion. A prompt that would take longer is left to ``mlx-qlayers tune``. On CUDA
            nothing is waited for after that either: what is still being compiled is measured at
            the next conversion.
        group: ranks that share the model and all make this call. Rank 0 measures, and the others
            take all of its results in the place of their own.

    Returns:
        The measurements known now. None is made where a backend was forced, where there are no
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
    with recording(), same_random_state():  # what is measured is no call of the user's
        counts = _counted(model)
        longest = _SHARE * budget_s
        missing = _missing(counts, name, longest)
        # Where all products of a token were tuned on such a device for the package.
        products = [lookup(r, name) for r in counts if r.family == "qmv" and r.size == 1]
        shipped = products and all(b and b.evidence.source == "shipped result" for b in products)
        missing = [] if shipped or (group and group.rank()) else missing
        left = 0
        if missing:
            with exclusive(name, budget_s) as alone:
                # Meanwhile another process may have measured some of them.
                missing = _missing(missing, name, longest)
                left = len(missing)
                if alone:
                    deadline = start + (1 - _STORING) * budget_s
                    measured_now = results(missing, deadline, longest)
                    left -= _measure(name, left, measured_now, notes)
        if group is not None:
            _adopt(name, group)
        known = {record: lookup(record, name) for record in counts}
    for path, reason in notes:
        note("calibration", path, reason)
    measured = tuple(
        Measured(record, counts[record], best.path, seconds)
        for record, best in known.items()
        if best is not None
        and best.evidence.source == "measured here"
        and best.path in (seconds := best.evidence.seconds or {})
    )
    return Calibration(measured, left, time.monotonic() - start if missing else 0.0)


def _missing(records: Iterable[Record], name: str, longest: float) -> list[Record]:
    """The records that are not measured, but for prompts that take longer than is given to one."""
    own = own_entries(name)

    def is_long(record: Record) -> bool:
        entry = own.get(record.key)
        return entry is not None and entry.path == COMPUTED and entry.seconds > longest

    missing = (each for each in records if lookup(each, name) is None)
    return [record for record in missing if not is_long(record)]


def _adopt(name: str, group: mx.distributed.Group) -> None:
    """Take rank 0's results for a device, so that all ranks run the same kernels."""
    rank = group.rank()
    own = {} if rank else {key: raw(entry) for key, entry in own_entries(name).items()}
    results = json.loads(gathered(group, json.dumps(own))[0])
    if rank:
        adopted[name] = {key: parsed(value) for key, value in results.items()}
        advance_epoch()


def _measure(
    name: str, total: int, measured: Iterator[Result], notes: list[tuple[str, str]]
) -> int:
    """Store the outcomes of so many measurements; of how many there was one."""
    from tqdm import tqdm

    done: dict[str, Entry] = {}
    count, saved = 0, time.monotonic()
    bar = tqdm(total=total, desc="measuring here", delay=1, disable=None, leave=False)
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


def _counted(model: nn.Module) -> dict[Record, int]:
    """The records that a model needs and how often, in the order of measurement."""
    layers = len(getattr(model, "layers", ())) or 1
    matrices: Counter[Any] = Counter(filter(None, map(_shape, model.modules())))
    counts: dict[Record, int] = {}
    for record in _records(model):
        counts[record] = matrices.get(record.matrix, layers)

    def order(item: tuple[Record, int]) -> tuple[float, ...]:
        record, count = item
        return record.stage, record.size, -count * record.bytes()

    return dict(sorted(counts.items(), key=order))


def _records(model: nn.Module) -> list[Record]:
    """The records of decoding and of prompts, at the sizes that are measured."""
    with collected_records() as asked, nothing_compiled():
        if not asked_by(model):
            asked |= dict.fromkeys(_products(model))
        elif device_of().gpu:  # a CPU computes a prompt as rows, sixteen after sixteen
            asked_by(model, prompt=CALIBRATED_PROMPTS[-1])
    every = records_of((each for one in asked for each in one.calibrated()), searched=False)
    slow = device_of().stock_compiles
    return [each for each in every if each.bytes() <= LARGEST and not (slow and each.stock_waits)]


def _products(model: nn.Module) -> Iterator[Record]:
    """Those of a model that is no language model of mlx-lm: each of its matrices alone."""
    for module in model.modules():
        if (shape := _shape(module)) is not None:
            scales, fmt = module["scales"], Format(module.group_size, module.bits, module.mode)
            dtype = scales.dtype if module.get("biases") is not None else mx.bfloat16
            yield QmvRecord(1, *shape, dtype, fmt)


def _shape(module: Any) -> tuple[int, int] | None:
    """N and K of a module's quantized matrix."""
    if "scales" not in module or module["weight"].ndim != 2:
        return None
    return module["weight"].shape[0], module["scales"].shape[1] * module.group_size


@contextmanager
def same_random_state() -> Iterator[None]:
    """The caller's random numbers stay what they would have been."""
    state: Any = mx.random.state
    before = [mx.array(each) for each in state]
    mx.eval(before)
    try:
        yield
    finally:
        for each, value in zip(state, before, strict=True):
            each[:] = value
