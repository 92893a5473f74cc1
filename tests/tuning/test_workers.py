"""Work in processes of its own: what brings a process down is recorded, and the rest goes on."""

import os
import time
from math import inf

import mlx.core as mx
import pytest

from mlx_qlayers.runtime import KernelTimeout
from mlx_qlayers.tuning import several, workers
from mlx_qlayers.tuning.families.row_sum import RowSumFamily
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.moves import Axis, Local, Upcast
from mlx_qlayers.tuning.several import tune_all
from mlx_qlayers.tuning.shapes import Target
from mlx_qlayers.tuning.tune import tune
from mlx_qlayers.tuning.workers import Ended, Workers

PROBLEMS = [Problem((16, k), mx.float32) for k in (256, 512)]
M1 = "applegpu_g13s"


class Small(RowSumFamily):
    """Few enough configurations to compile them all."""

    axes = (Axis(Upcast, "upcast", (1, 2)), Axis(Local, "local", (1, 4)))


class Fatal(RowSumFamily):
    """A family some of whose configurations end or stop their process."""

    name = "fatal"
    axes = (Axis(Upcast, "upcast", (1, 2, 4)),)

    def run(self, inputs, problem, config):
        if config.upcast == 2:
            os._exit(9)
        if config.upcast == 4:
            time.sleep(60)
        return super().run(inputs, problem, config)


class NotThere(Small):
    """A family without kernels."""

    name = "not_there"

    def run(self, inputs, problem, config):
        raise RuntimeError("no such kernel")


class Hanging(Small):
    """A family one of whose kernels does not come back."""

    name = "hanging"

    def run(self, inputs, problem, config):
        if config.upcast == 2:
            raise KernelTimeout("no result within 20 s")
        return super().run(inputs, problem, config)


@pytest.fixture(autouse=True)
def two(monkeypatch):
    monkeypatch.setattr(several, "processes", lambda machine: 2)


def tune_each(family, problems=PROBLEMS, **options):
    """What is found for problems by their keys."""
    targets = [Target(family, problem) for problem in problems]
    found = tune_all(targets, machine=M1, beam=1, keep=False, **options)
    return {target.key: tuned for target, tuned in found}


def test_problems_are_tuned_side_by_side_as_one_after_the_other():
    gains = []
    found = tune_each(Small(), progress=lambda target, gain: gains.append(gain))
    for problem in PROBLEMS:
        alone = tune(Small(), problem, machine=M1, beam=1, keep=False)
        tuned = found[Small().key(problem)]
        assert tuned.trials == alone.trials and tuned.seconds == alone.seconds
    assert max(gains) >= 1 and len(gains) == sum(len(tuned.trials) for tuned in found.values())


def test_what_ends_or_stops_its_process_is_recorded_and_skipped(monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE", 5.0)
    found = tune_each(Fatal())
    assert len(found) == 2
    for tuned in found.values():
        problems = {trial.config.upcast: trial.problem for trial in tuned.trials}
        assert problems == {1: "", 2: "its process ended with 9", 4: "hangs"}
        assert tuned.config.upcast == 1 and tuned.seconds < inf


def test_after_a_kernel_that_hangs_another_process_goes_on():
    for tuned in tune_each(Hanging()).values():
        problems = {(t.config.upcast, t.config.local): t.problem for t in tuned.trials}
        assert "no result" in problems[2, 4] and problems[1, 1] == problems[1, 4] == ""


def test_a_problem_that_cannot_be_tuned_is_told_and_left(capsys):
    targets = [Target(Small(), PROBLEMS[0]), Target(NotThere(), PROBLEMS[1])]
    ((target, _),) = tune_all(targets, machine=M1, beam=1, keep=False)
    assert target == targets[0]
    assert "no such kernel" in capsys.readouterr().err


def test_an_interrupt_still_gives_what_was_found():
    seen, found = [], []

    def progress(target, gain):
        seen.append(gain)
        if len(seen) == 2:
            raise KeyboardInterrupt

    targets = [Target(Small(), problem) for problem in PROBLEMS]
    options = {"machine": M1, "beam": 1, "keep": False, "progress": progress}
    with pytest.raises(KeyboardInterrupt):
        for _, tuned in tune_all(targets, **options):
            found.append(tuned)
    assert len(found) == 2 and all(tuned.gain >= 1 for tuned in found)


def take_turns(job, place):
    """A job: to keep others waiting for longer than they may be silent."""
    place.send("there")
    with place.turn():
        time.sleep(2)
        place.send("had it")


def test_waiting_for_a_turn_is_no_silence(monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE", 3.0)
    with Workers(3, take_turns) as team:
        found = list(team.messages(range(3)))
    assert sorted(message for _, message in found) == ["had it"] * 3 + ["there"] * 3


def build(job, place):
    """A job: to build something of the job's name, silently."""
    place.send("there")
    with place.building(job):
        begun = time.monotonic()
        time.sleep(2.5)
        place.send((begun, time.monotonic()))


def test_what_others_build_is_waited_for_and_may_take_long(monkeypatch):
    monkeypatch.setattr(workers, "_PATIENCE", 1.5)
    with Workers(3, build) as team:
        messages = list(team.messages(["a", "a", "b"]))
    (first, second), ((begun, _),) = (
        sorted(m for job, m in messages if job == name and m != "there") for name in "ab"
    )
    assert first[1] <= second[0] and begun < second[0]


def count(job, place):
    """A job: so many messages, or a fault."""
    for i in range(job):
        place.send(i)
    if job == 1:
        raise ValueError("one is not enough")
    if job == 2:
        os._exit(3)


def test_messages_come_with_their_jobs_and_faults_end_no_other_job():
    with Workers(2, count) as team:
        found = list(team.messages([0, 1, 2, 3]))
    assert [m for job, m in found if job == 3] == [0, 1, 2]
    assert [m for job, m in found if job == 1] == [0, Ended("ValueError: one is not enough")]
    assert [m for job, m in found if job == 2] == [0, 1, Ended("its process ended with 3")]
    assert not [m for job, m in found if job == 0]
