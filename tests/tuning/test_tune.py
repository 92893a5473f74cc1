"""Tuning a kernel from end to end, with costs computed from counters."""

from dataclasses import asdict
from itertools import count
from math import inf
from typing import ClassVar

import mlx.core as mx
import pytest
import row_sum
from counted import DEVICE, Counted
from row_sum import RowSum, RowSumRecord

from mlx_qlayers.dispatch.measurements import lookup
from mlx_qlayers.measurements import store
from mlx_qlayers.runtime import KernelTimeout, use_backend
from mlx_qlayers.tuning import evaluator
from mlx_qlayers.tuning.evaluator import Times
from mlx_qlayers.tuning.timing import Sample
from mlx_qlayers.tuning.tune import DeviceLost, fastest, tune, tune_all

COUNTED = {"evaluator": Counted}
SHAPE = 16, 1024, mx.float32


class Small(RowSumRecord):
    """Few enough configurations to compile them all."""

    values: ClassVar = {"upcast": (1, 2), "unroll": (1, 2, 4), "local": (1, 4), "group": (1, 4)}


SMALL = Small(*SHAPE)


def test_finds_nearly_the_best_and_remembers_it():
    tuned = tune(SMALL, beam=1, **COUNTED)
    everything = [RowSum()]
    for config in everything:
        everything += [new for new in SMALL.near(config) if new not in everything]
    trials = [*map(Counted(SMALL).attempt, everything)]
    assert tuned.seconds <= 1.05 * min(t.seconds for t in trials) and tuned.gain > 1
    assert len(tuned.trials) < len(everything)
    found = lookup(SMALL, DEVICE)
    assert found is not None and found[:2] == ("kernel", tuned.config)
    assert found.evidence.source == "measured here" and found.evidence.date


def test_is_reproducible_and_starts_from_what_is_stored():
    first = tune(SMALL, keep=False, **COUNTED)
    assert tune(SMALL, **COUNTED).trials == first.trials
    again = tune(SMALL, **COUNTED)
    assert again.seconds <= first.seconds


def test_a_budget_that_is_spent_at_once_gives_the_heuristic():
    tuned = tune(SMALL, budget_s=0, keep=False, **COUNTED)
    assert tuned.config == SMALL.heuristic("metal") and tuned.gain == 1
    assert len(tuned.trials) == 1


class Faulty(Small):
    """A record some of whose configurations do not work."""

    def bind(self, inputs, config):
        launch = super().bind(inputs, config)
        if config.unroll == 2:
            return lambda inputs: [launch(inputs)[0] + 0.1]
        if config.unroll == 4:
            return lambda inputs: [launch(inputs)[0] * float("nan")]
        if config.upcast == 2:
            raise RuntimeError("the kernel does not compile")
        return launch


def test_broken_candidates_are_recorded_and_skipped():
    tuned = tune(Faulty(*SHAPE), keep=False, **COUNTED)
    problems = {t.config: t.problem for t in tuned.trials if t.problem}
    assert all(t.seconds == inf for t in tuned.trials if t.problem)
    assert any("wrong by" in p for c, p in problems.items() if c.unroll == 2)
    assert any("nan" in p for c, p in problems.items() if c.unroll == 4)
    assert any("does not compile" in p for p in problems.values())
    good = tuned.config
    assert good.unroll not in (2, 4) and good.upcast != 2


class ReadsOutside(Small):
    """A record whose search admits what its rows do not: turns that reach beyond the last one."""

    values: ClassVar = {"unroll": (1, 2), "padded": (False, True)}

    def why_not(self, config):
        return None if config.group == 1 else "one SIMD group"

    def bind(self, inputs, config):
        m, k = inputs[0].shape
        return lambda inputs: row_sum.KERNEL(
            [inputs[0], mx.array([m, k], mx.int32)],
            template={"T": inputs[0].dtype, **asdict(config)},
            grid=(32 * config.local, -(-m // (config.upcast * config.local)), 1),
            threadgroup=(32 * config.local, 1, 1),
            output_shapes=[(m,)],
        )


@pytest.mark.parametrize("rates", [Counted, evaluator.Evaluator])
def test_a_candidate_that_reads_outside_is_recorded(rates):
    """Also where a CPU measures: its small problems are verified by the checked build."""
    with use_backend("host"):
        tuned = tune(ReadsOutside(8, 40, mx.float32), keep=False, evaluator=rates)
    problems = [t for t in tuned.trials if t.problem]
    assert problems and all(not t.config.padded for t in problems)
    assert any("OutOfBounds" in t.problem for t in problems)
    assert tuned.config.padded


def hanging(number):
    """A record whose candidate of such a number does not come back; each is launched twice."""
    launches = count(2)

    class Hanging(Small):
        def bind(self, inputs, config):
            launch = super().bind(inputs, config)

            def run(inputs):
                if next(launches) // 2 == number:
                    raise KernelTimeout("no result within 20 s")
                return launch(inputs)

            return run

    return Hanging(*SHAPE)


def test_a_candidate_that_hangs_ends_the_search():
    tuned = tune(hanging(3), **COUNTED)
    assert len(tuned.trials) == 3
    assert "no result" in tuned.trials[-1].problem and tuned.trials[0].seconds < inf
    # It is not known whether another path is faster.
    assert tuned.path == "uncompared" == lookup(SMALL, DEVICE).path


@pytest.mark.parametrize("number", [1, 3])
def test_after_a_candidate_that_hangs_no_other_problem_is_tuned(number, capsys):
    found = tune_all([hanging(number), SMALL], keep=False, **COUNTED)
    if number > 1:
        assert next(found).path == "uncompared"
    with pytest.raises(DeviceLost, match="no result"):
        next(found)


class NoKernel(Small):
    """A record of which nothing works."""

    def bind(self, inputs, config):
        raise RuntimeError("no such kernel")


def test_a_problem_that_cannot_be_tuned_is_told_and_left(capsys):
    targets = [NoKernel(*SHAPE), SMALL]
    gains = []
    options = {"keep": False, "progress": lambda record, gain: gains.append(gain), **COUNTED}
    (tuned,) = tune_all(targets, beam=1, **options)
    assert tuned.record == SMALL and tuned.gain == max(gains) > 1
    assert "no such kernel" in capsys.readouterr().err


def test_a_device_that_refuses_all_work_ends_the_search(monkeypatch):
    evaluate, refuses = mx.eval, iter([False, True])

    def refused(*arrays):
        if getattr(arrays[0], "shape", None) == (8,) and next(refuses):
            raise RuntimeError("an illegal memory access was encountered")
        return evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", refused)
    tuned = tune(Faulty(*SHAPE), keep=False, **COUNTED)
    assert sum("does not compile" in t.problem for t in tuned.trials) == 2


def samples(*seconds):
    return [Times(Sample.of([cold]), Sample.of([warm])) for cold, warm in seconds]


def test_a_configuration_is_never_slower_than_the_heuristics():
    assert fastest(samples((1.0, 1.0), (0.9, 1.0), (0.8, 0.9))) == 2
    # Within noise, or slower with inputs in a cache.
    assert fastest(samples((1.0, 1.0), (0.995, 1.0), (0.5, 1.1))) == 0
    wide = Times(Sample(0.9, 0.6, 1.2, 9), Sample.of([1.0]))
    assert fastest([*samples((1.0, 1.0)), wide]) == 0


def test_without_a_backend_there_is_nothing_to_tune():
    with use_backend("reference"), pytest.raises(ValueError, match="nothing to tune"):
        tune(SMALL)


@pytest.mark.parametrize(("share", "path"), [(0.99, "stock"), (1.05, "kernel")])
def test_stock_is_taken_unless_the_kernel_is_surely_faster(share, path):
    class Beside(Counted):
        def compared(self, configs, paths=True):
            own, _ = super().compared(configs)
            best = own[fastest(own)].cold.median
            return own, {"stock": Times(*[Sample.of([best / 0.97 * share])] * 2)}

    tuned = tune(SMALL, beam=1, evaluator=Beside)
    assert tuned.path == path == lookup(SMALL, DEVICE).path
    assert tuned.seconds == store.listed()[DEVICE][SMALL.key].seconds


def test_on_a_cpu_configurations_are_measured():
    with use_backend("host"):
        tuned = tune(SMALL, beam=1, budget_s=3)
    assert not tuned.trials[0].problem and tuned.path in ("kernel", "stock")
    assert 0 < tuned.times["stock"].cold.median < 1
    assert set(store.listed()) == {"cpu"} and lookup(SMALL, "cpu").config == tuned.config
