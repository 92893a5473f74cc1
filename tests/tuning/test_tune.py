"""Tuning a kernel from end to end, with costs computed from counters."""

from dataclasses import asdict, replace
from math import inf

import mlx.core as mx
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.common import row_sum
from mlx_qlayers.metal.common.row_sum import RowSum
from mlx_qlayers.metal.quantized_matmul.qmv import QmvMatrixConfig
from mlx_qlayers.runtime import KernelTimeout, use_backend
from mlx_qlayers.tuning import judge, store
from mlx_qlayers.tuning.families import FAMILIES, ROW_SUM
from mlx_qlayers.tuning.families.row_sum import RowSumFamily
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.judge import Times, judge_of
from mlx_qlayers.tuning.machines import MACHINES
from mlx_qlayers.tuning.moves import Axis, Group, Local, PadTo, Unroll, Upcast
from mlx_qlayers.tuning.search import Trial
from mlx_qlayers.tuning.timing import Sample
from mlx_qlayers.tuning.tune import fastest, finalists, tune

PROBLEM = Problem((16, 1024), mx.float32)
M1 = "applegpu_g13s"


class Small(RowSumFamily):
    """Few enough configurations to compile them all."""

    axes = (
        Axis(Upcast, "upcast", (1, 2)),
        Axis(Unroll, "unroll", (1, 2, 4)),
        Axis(Local, "local", (1, 4)),
        Axis(Group, "group", (1, 4)),
    )


SMALL = Small()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    # Compiled kernels stay in the shared cache, results go to a folder of this test's own.
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(judge.Computed, "_counted", {})
    store.forget()
    yield
    store.forget()


def test_finds_nearly_the_best_and_remembers_it():
    tuned = tune(SMALL, PROBLEM, machine=M1, beam=1)
    everything = SMALL.all(PROBLEM, RowSum())
    trials = list(judge_of(SMALL, PROBLEM, M1).attempts(everything))
    assert tuned.seconds <= 1.05 * min(t.seconds for t in trials) and tuned.gain >= 1
    assert len(tuned.trials) < len(everything)
    found = store.stored(SMALL.key(PROBLEM), (RowSum,), SMALL.kernels, M1)
    assert found == ("modelled", tuned.config)


def test_is_reproducible_and_starts_from_what_is_known():
    first = tune(SMALL, PROBLEM, machine=M1, keep=False)
    assert tune(SMALL, PROBLEM, machine=M1).trials == first.trials
    again = tune(SMALL, PROBLEM, machine=M1)
    assert again.seconds <= first.seconds


def test_a_budget_that_is_spent_at_once_gives_the_heuristic():
    tuned = tune(SMALL, PROBLEM, machine=M1, budget_s=0, keep=False)
    assert tuned.config == SMALL.heuristic(PROBLEM, "metal") and tuned.gain == 1
    assert len(tuned.trials) == 1


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_has_plausible_costs(machine):
    trial = judge_of(ROW_SUM, PROBLEM, machine).attempt(RowSum(unroll=4))
    floor = 16 * 1024 * 4 / (MACHINES[machine].gigabytes * 1e9)
    assert floor < trial.seconds < 1e-3


class Faulty(Small):
    """A family some of whose configurations do not work."""

    name = "faulty"

    def run(self, inputs, problem, config):
        y = super().run(inputs, problem, config)
        if config.unroll == 2:
            return y + 0.1
        if config.unroll == 4:
            return y * float("nan")
        if config.upcast == 2:
            raise RuntimeError("the kernel does not compile")
        return y


def test_broken_candidates_are_recorded_and_skipped():
    tuned = tune(Faulty(), PROBLEM, machine=M1, keep=False)
    problems = {t.config: t.problem for t in tuned.trials if t.problem}
    assert all(t.seconds == inf for t in tuned.trials if t.problem)
    assert any("wrong by" in p for c, p in problems.items() if c.unroll == 2)
    assert any("nan" in p for c, p in problems.items() if c.unroll == 4)
    assert any("does not compile" in p for p in problems.values())
    good = tuned.config
    assert good.unroll not in (2, 4) and good.upcast != 2


class ReadsOutside(Small):
    """A family whose search admits what its rows do not: turns that reach beyond the last one."""

    axes = (Axis(Unroll, "unroll", (1, 2)), Axis(PadTo, "padded", (False, True)))

    def why_not(self, config, problem):
        return None if config.group == 1 else "one SIMD group"

    def run(self, inputs, problem, config):
        m, k = inputs[0].shape
        (y,) = row_sum.KERNEL(
            [inputs[0], mx.array([m, k], mx.int32)],
            template={"T": inputs[0].dtype, **asdict(config)},
            grid=(32 * config.local, -(-m // (config.upcast * config.local)), 1),
            threadgroup=(32 * config.local, 1, 1),
            output_shapes=[(m,)],
        )
        return y


def test_a_candidate_that_reads_outside_is_recorded():
    tuned = tune(ReadsOutside(), Problem((8, 40), mx.float32), machine=M1, keep=False)
    problems = [t for t in tuned.trials if t.problem]
    assert problems and all(not t.config.padded for t in problems)
    assert any("OutOfBounds" in t.problem for t in problems)
    assert tuned.config.padded


def test_a_candidate_that_hangs_ends_the_search(monkeypatch):
    calls = []

    def wait(result, seconds, *inputs):
        calls.append(seconds)
        if len(calls) == 3:
            raise KernelTimeout("no result within 20 s")
        return result

    monkeypatch.setattr(judge, "wait_for", wait)
    tuned = tune(SMALL, PROBLEM, machine=M1, keep=False)
    assert len(tuned.trials) == 3
    assert "no result" in tuned.trials[-1].problem and tuned.trials[0].seconds < inf


def test_a_heuristic_that_does_not_work_is_an_error():
    class Broken(Small):
        def run(self, inputs, problem, config):
            raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match=r"row_sum.*no such kernel"):
        tune(Broken(), PROBLEM, machine=M1)


def times(cold, warm=1.0):
    return Times(*(Sample(t, 0.995 * t, 1.005 * t, 5) for t in (cold, warm)))


def test_the_finalists_are_the_heuristic_and_the_best_that_work():
    trials = [Trial(config, seconds) for config, seconds in zip("abcde", range(5), strict=True)]
    assert finalists("h", trials) == ["h", "a", "b", "c"]
    assert finalists("b", trials) == ["b", "a", "c", "d"]
    broken = [*trials[:2], Trial("z", problem="wrong")]
    assert finalists("a", broken) == ["a", "b"] and finalists("a", []) == ["a"]


def test_a_finalist_has_to_beat_the_heuristic():
    assert fastest([times(2.0), times(1.9), times(1.5), times(1.7)]) == 2
    assert fastest([times(2.0), times(1.99), times(2.5)]) == 0, "a gain within noise"
    assert fastest([times(2.0), times(1.5, warm=1.2), times(1.8)]) == 2, "slower in a cache"
    assert fastest([times(2.0)]) == 0


def test_launch_bounds_leave_a_thread_its_share_of_registers():
    """On an H200; Apple's compiler is not told how many threadgroups should fit."""
    problem = Problem((1, 64, 512), mx.float16, "affine-64-4-t")
    family = FAMILIES["qmv"]
    small = QmvMatrixConfig(fragments=1, run=16, tiles=1, simds=2)
    large = replace(small, run=64, tiles=4, ahead=2)

    def seconds(machine, config):
        return judge_of(family, problem, machine).attempt(config).seconds

    for config, holds in ((small, True), (large, False)):
        bound = replace(config, occupancy=16)
        assert (family.registers(config, problem) <= 65536 // (16 * 32)) == holds
        assert seconds(M1, bound) == seconds(M1, config)
        assert (seconds("sm_90", bound) == seconds("sm_90", config)) == holds
    assert seconds("sm_90", replace(large, occupancy=16)) > seconds("sm_90", large)


def test_bad_arguments():
    with pytest.raises(ValueError, match="machine must be one of"):
        tune(ROW_SUM, PROBLEM, machine="g99")
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        with pytest.raises(ValueError, match="no GPU"):
            tune(ROW_SUM, PROBLEM)


def test_an_interrupt_keeps_what_was_found():
    seen = []

    def progress(trial):
        seen.append(trial)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(SMALL, PROBLEM, machine=M1, progress=progress)
    entry = store.listed()[M1][SMALL.key(PROBLEM)]
    best = min(seen, key=lambda trial: trial.seconds)
    assert entry.seconds == best.seconds and entry.config == asdict(best.config)
    assert entry.tried == 4 and entry.heuristic == seen[0].seconds


PROBLEMS = {
    "row_sum": Problem((7, 96), mx.float32),
    "qmv": Problem((3, 40, 128), mx.float16, "affine-64-4-t"),
    "qmm": Problem((17, 40, 128), mx.float16, "affine-64-4-t"),
    "attention_decode": Problem((2, 7, 256, 64, 64), mx.float16, "bits-4"),
    "attention_step": Problem((1, 4, 2, 256, 64, 64), mx.float16),
    "grid_sample": Problem((4, 256, 16, 2), mx.float16, "any"),
    "attention_forward": Problem((1, 4, 2, 32, 64, 64, 64), mx.float16, "causal"),
}
ASKED = {
    "row_sum": (7, 96, mx.float32),
    "qmv": (3, 40, 128, mx.float16, Format(64, 4)),
    "qmm": (17, 40, 128, mx.float16, Format(64, 4), True),
    "attention_decode": (mx.float16, 7, 64, 64, 4, 2, 256),
    "attention_step": (mx.float16, 1, 4, 2, 256, 64, 64),
    "grid_sample": (16, mx.float16, False, 2),
    "attention_forward": ((1, 4, 2, 32, 64, 64, 64), mx.float16, True),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_agrees_with_itself(name):
    """Its heuristic is legal and right, a question gives its problem, and stock is a path."""
    family, problem = FAMILIES[name], PROBLEMS[name]
    assert family.asked(*ASKED[name]) == problem
    for device in ("metal", "cuda"):
        config = family.heuristic(problem, device)
        assert family.why_not(config, problem) is None
        assert family.completed(config, problem) == config
        near = family.near(config, problem)
        assert near and set(near) < set(family.all(problem, config))
    tuned = tune(family, problem, machine=M1, budget_s=0, keep=False)
    assert tuned.config == family.heuristic(problem, "metal") and not tuned.trials[0].problem
    inputs = family.inputs(problem)
    truth = family.reference(inputs, problem)
    with use_backend("host"):
        for path in family.paths(problem).values():
            found = path(inputs).astype(mx.float32)
            assert mx.allclose(found, truth, atol=0.05 * mx.abs(truth).max())
    assert "stock" in family.paths(problem)


def test_attention_of_keys_that_are_not_packed():
    family = FAMILIES["attention_decode"]
    problem = Problem((2, 7, 200, 64, 64), mx.bfloat16, "bits-0")
    tuned = tune(family, problem, machine=M1, budget_s=0, keep=False)
    assert not tuned.trials[0].problem


@pytest.mark.parametrize("kind", ["norm-3", "norm-gate", "residual"])
def test_products_with_what_stands_around_them(kind):
    mx.random.seed(7)
    family = FAMILIES["qmv"]
    problem = family.asked(3, 48, 128, mx.bfloat16, Format(64, 4), kind)
    assert problem.form == f"affine-64-4-t-{kind}"
    inputs, (config, *_) = family.inputs(problem), family.others(problem, "metal")
    truth = family.reference(inputs, problem)
    assert truth.shape == (3, {"norm-3": 16, "norm-gate": 24, "residual": 48}[kind])
    with use_backend("host"):
        found = family.run(inputs, problem, config)
    stock = family.paths(problem)["stock"](inputs)
    for y, factor in ((found, 1), (stock, 2)):
        allowed = factor * family.tolerance(problem) * mx.abs(truth).max()
        assert mx.abs(y - truth).max() <= allowed
