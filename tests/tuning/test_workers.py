"""Candidates in processes of their own: those that bring a process down are recorded too."""

import os
import time

import mlx.core as mx
import pytest

from mlx_qlayers.metal.row_sum import RowSum
from mlx_qlayers.tuning import workers as module
from mlx_qlayers.tuning.families.row_sum import RowSumFamily
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.judge import judge_of
from mlx_qlayers.tuning.moves import Axis, Local, Upcast
from mlx_qlayers.tuning.tune import tune
from mlx_qlayers.tuning.workers import Workers

PROBLEM = Problem((16, 1024), mx.float32)
M1 = "applegpu_g13s"


class Fatal(RowSumFamily):
    """A family some of whose configurations end or stop their process."""

    name = "fatal"
    axes = (Axis(Upcast, "upcast", (1, 2, 4)), Axis(Local, "local", (1, 2, 4)))

    def run(self, inputs, problem, config):
        if config.upcast == 2:
            os._exit(9)
        if config.upcast == 4:
            time.sleep(60)
        return super().run(inputs, problem, config)


@pytest.fixture
def workers():
    with Workers(2, M1) as found:
        yield found


def test_trials_are_those_of_one_process(workers):
    family = RowSumFamily()
    configs = [RowSum(local=n) for n in (1, 2, 4)]
    for _ in range(2):
        trials = list(workers.attempts(family, PROBLEM, configs))
        alone = judge_of(family, PROBLEM, M1).attempts(configs)
        assert sorted(trials, key=str) == sorted(alone, key=str)


def test_a_process_that_ends_or_hangs_is_replaced(workers, monkeypatch):
    list(workers.attempts(RowSumFamily(), PROBLEM, [RowSum(), RowSum(local=2)]))  # compiled by now
    monkeypatch.setattr(module, "_START", 6.0)
    monkeypatch.setattr(module, "_PATIENCE", 3.0)
    configs = [RowSum(upcast=n, local=m) for m in (1, 2) for n in (1, 2)] + [RowSum(upcast=4)]
    trials = {t.config: t for t in workers.attempts(Fatal(), PROBLEM, configs)}
    assert set(trials) == set(configs)
    for config, trial in trials.items():
        expected = {1: "", 2: "its process ended with 9", 4: "hangs"}[config.upcast]
        assert trial.problem == expected


def test_a_round_that_is_left_does_not_disturb_the_next(workers):
    family = RowSumFamily()
    configs = [RowSum(local=n) for n in (1, 2, 4, 8)]
    for _ in workers.attempts(family, PROBLEM, configs):
        break
    other = Problem((8, 1024), mx.float32)
    trials = list(workers.attempts(family, other, configs))
    alone = judge_of(family, other, M1).attempts(configs)
    assert sorted(trials, key=str) == sorted(alone, key=str)


def test_a_search_finds_the_same_with_them(workers):
    family = RowSumFamily()
    with_them = tune(family, PROBLEM, machine=M1, beam=1, workers=workers, keep=False)
    without = tune(family, PROBLEM, machine=M1, beam=1, keep=False)
    assert set(with_them.trials) == set(without.trials)
    assert with_them.seconds == without.seconds
