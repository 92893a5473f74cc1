"""Tuning several problems within one budget, side by side where that is of use."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import mlx.core as mx

from .judge import judge_of
from .search import Trial
from .shapes import Target
from .store import device_kind, forget
from .tune import Search, Tuned, remember, tune
from .workers import Ended, Place, Workers

# Processes at most: each holds the inputs of a problem in the GPU's memory.
_MOST = 14
# Seconds that the last measurements of a problem take, and the most of a budget that they get.
_LAST, _MOST_LAST = 1.2, 0.3
# Called after each trial with the problem and its gain so far.
Progress = Callable[[Target, float], Any]


def tune_all(
    problems: Sequence[Target],
    *,
    beam: int = 4,
    budget_s: float = 60.0,
    machine: str | None = None,
    progress: Progress = lambda target, gain: None,
    keep: bool = True,
) -> Iterator[tuple[Target, Tuned[Any]]]:
    """Tune several problems within a budget; each has an even share of it.

    On CUDA, whose compiler takes a second for a kernel, they are tuned side by side, in processes
    of which one at a time has the GPU for its measurements. What brings a process down is recorded
    and skipped.

    Args:
        problems: what to tune.
        beam: see :func:`tune`.
        budget_s: seconds for all of them.
        machine: see :func:`tune`.
        progress: called after each trial with the problem and its gain so far.
        keep: whether to store the results.

    Yields:
        Each problem and what was found, which is stored by then. What comes when the budget is
        spent is left out.

    Raises:
        KeyboardInterrupt: after what was found until then.
    """
    count = min(processes(machine), 2 * len(problems))
    if count > 1:
        jobs = [_Job(target, beam, machine, keep) for target in problems]
        yield from _side_by_side(jobs, count, budget_s, progress)
        return
    deadline = time.monotonic() + budget_s
    for i, target in enumerate(problems):
        share = (deadline - time.monotonic()) / (len(problems) - i)
        if share <= 0:
            return
        job = _Job(target, beam, machine, keep)

        def note(trial: Trial[Any], job: _Job = job) -> None:
            job.trials.append(trial)
            progress(job.target, job.gain)

        yield (
            target,
            tune(*target, beam=beam, budget_s=share, machine=machine, progress=note, keep=keep),
        )


def processes(machine: str | None) -> int:
    """How many processes this machine can use; 1 where more gain nothing.

    Metal's compiler takes a fraction of NVIDIA's time, and memory is shared with the system.
    """
    cores = os.cpu_count() or 1
    if (machine is None and device_kind() == "metal") or cores < 4:
        return 1
    return min(cores - 2, _MOST)


@dataclass
class _Job:
    """One problem's search, and what is known of it.

    Attributes:
        target: the problem.
        beam: configurations to follow.
        machine: see :func:`tune`.
        keep: whether to store the result.
        seconds: for the search, from its start.
        end: when it ends at the latest, by ``time.monotonic``, which processes share.
        trials: what was tried.
        under_way: what is being tried.
        before: trials when it was begun, or begun anew.
    """

    target: Target
    beam: int
    machine: str | None
    keep: bool
    seconds: float = inf
    end: float = inf
    trials: list[Trial[Any]] = field(default_factory=list)
    under_way: Any = None
    before: int = -1

    @property
    def gain(self) -> float:
        """How many times as fast as the first configuration the best is."""
        return self.trials[0].seconds / min(trial.seconds for trial in self.trials)

    @property
    def stock(self) -> str:
        """What names the kernels of the stock operator, where problems share them."""
        family, problem = self.target
        return f"{family.name}-{problem.shape[0]}-{problem.dtype}"


@dataclass(frozen=True)
class _Build:
    """A job: have MLX build its operator, which takes it up to a minute and is kept in a file."""

    target: Target


@dataclass(frozen=True)
class _Begun:
    config: Any


def _side_by_side(
    jobs: Sequence[_Job], count: int, budget_s: float, progress: Progress
) -> Iterator[tuple[Target, Tuned[Any]]]:
    measures = jobs[0].machine is None
    search = budget_s - min(_MOST_LAST * budget_s, _LAST * len(jobs)) * measures
    for job in jobs:
        job.end, job.seconds = time.monotonic() + search, search * count / len(jobs)
    interrupt: KeyboardInterrupt | None = None
    builds = list({job.stock: _Build(job.target) for job in jobs}.values()) if measures else []
    with Workers(count, _work, measures) as workers:
        messages = workers.messages([*builds, *jobs])
        try:
            while True:
                try:
                    job, message = next(messages)
                    if isinstance(job, _Build):
                        continue
                    if (tuned := _noted(workers, job, message, progress)) is not None:
                        yield job.target, tuned
                except StopIteration:
                    break
                except KeyboardInterrupt as caught:
                    interrupt = caught
                    workers.stop()
                    messages = workers.messages([])
        finally:
            # Whoever wants no more still keeps what was found.
            workers.stop()
            for _ in workers.messages([]):
                pass
    if interrupt is not None:
        raise interrupt


def _noted(workers: Workers, job: _Job, message: Any, progress: Progress) -> Tuned[Any] | None:
    """Take down what a message says; what was found if it is the last one of its job."""
    if isinstance(message, _Begun):
        job.under_way = message.config
    elif isinstance(message, Trial):
        job.under_way = None
        job.trials.append(message)
        progress(job.target, job.gain)
    elif isinstance(message, Tuned):
        forget()  # what is stored by another process is read anew
        return message
    elif isinstance(message, Ended):
        if job.under_way is not None:
            job.trials.append(Trial(job.under_way, problem=message.why))
            job.under_way = None
        if len(job.trials) > job.before:
            job.before = len(job.trials)
            workers.add(job)
        else:
            print(f"mlx-qlayers: {job.target.key} is not tuned: {message.why}", file=sys.stderr)
    return None


def _work(job: _Job | _Build, place: Place) -> None:
    """Do a job in a process of its own."""
    if isinstance(job, _Job):
        _tune_one(job, place)
        return
    judge = judge_of(*job.target)
    with place.building(_Job(job.target, 1, None, False).stock):
        judge.build(stock=True)


def _tune_one(job: _Job, place: Place) -> None:
    family, problem = job.target
    turn = place.turn if job.machine is None else nullcontext
    until = min(job.end, time.monotonic() + job.seconds)
    judge = judge_of(family, problem, job.machine)

    def tried(trial: Trial[Any]) -> None:
        place.send(trial)
        if judge.hung or (trial.problem and not _works()):
            os._exit(1)  # and another process goes on with what is known

    search = Search(
        judge,
        job.beam,
        lambda: 0.0 if place.stopping() else until,
        lambda config: place.send(_Begun(config)),
        tried,
        turn,
        nullcontext if job.machine else partial(place.building, job.stock),
        {trial.config: trial for trial in job.trials},
    )
    tuned = search.run()
    if job.keep:
        remember(judge.name, family, tuned)
    place.send(tuned)


def _works() -> bool:
    """Whether the GPU still takes work: after a kernel that reads outside CUDA refuses all."""
    with contextlib.suppress(RuntimeError):
        mx.eval(mx.zeros(8) + 1)
        return True
    return False
