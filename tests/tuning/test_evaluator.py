"""Measuring behind other work, with MLX's own operators in place of kernels."""

import mlx.core as mx
import pytest

from mlx_qlayers.dispatch.products import QmvProblem
from mlx_qlayers.formats import Format
from mlx_qlayers.tuning import evaluator, queue_timer
from mlx_qlayers.tuning.evaluator import Evaluator
from mlx_qlayers.tuning.families.quantized_matmul import QmvFamily
from mlx_qlayers.tuning.queue_timer import QueueTimer
from mlx_qlayers.tuning.timing import Sample

PROBLEM = QmvProblem(1, 256, 512, mx.float32, Format(64, 4))


class Stock(QmvFamily):
    """A family without kernels of its own."""

    def bind(self, inputs, problem, config):
        return lambda inputs: mx.quantized_matmul(*inputs)

    def paths(self, inputs, problem):
        return {"stock": lambda inputs: self.stock(inputs, problem)}

    def stock(self, inputs, problem):
        return mx.quantized_matmul(*inputs)


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(evaluator, "backend", lambda: "cuda")
    monkeypatch.setattr(evaluator, "file_of", lambda device: "some_gpu")
    monkeypatch.setattr(evaluator, "_COLD", 1 << 19)
    monkeypatch.setattr(queue_timer, "_SMALLEST", 32)
    monkeypatch.setattr(queue_timer, "_LARGEST", 32)
    monkeypatch.setattr(queue_timer, "_MOST", 1e-3)
    evaluator._timer.cache_clear()
    return Evaluator(Stock(), PROBLEM)


def test_the_work_before_and_the_links_are_left_out(measured, monkeypatch):
    measured._rounds = {len(measured.sets): 3, 1: 7}

    def seconds(chains, repeats):
        launches = 7 if warm else 3 * len(measured.sets)
        whole = {"links": 2.0, "stock": 2.0 + 4 * launches}
        warm.append(True)
        return {name: Sample.of([whole.get(name, 2.0 + 5 * launches)]) for name in chains}

    warm = []
    monkeypatch.setattr(evaluator._timer(True), "seconds", seconds)
    config = PROBLEM.heuristic("cuda")
    assert measured.rate(config) == pytest.approx(5)
    warm.clear()
    (times,), paths = measured.compared([config])
    assert (times.cold.median, times.warm.median) == pytest.approx((5, 5))
    assert paths["stock"].cold.median == pytest.approx(4)


def test_what_remains_is_as_uncertain_as_what_is_left_out():
    chain, floor = Sample.of([6e-3] * 4), Sample.of([5e-3, 5e-3, 7e-3, 7e-3])
    left = chain.less(floor)
    # That was held up twice: without its spread a time of nothing would look sure.
    assert left.median == 1e-9 and left.spread > 1
    steady = chain.less(Sample.of([5e-3] * 4))
    assert steady.median == pytest.approx(1e-3) and steady.spread == pytest.approx(0)


def test_a_time_is_taken_again_where_the_work_before_was_held_up(measured, monkeypatch):
    measured._rounds = {len(measured.sets): 1}
    asked = []

    def seconds(chains, repeats):
        asked.append(repeats)
        held_up = repeats // 2 if len(asked) == 1 else 1
        links = [2.0] * (repeats - held_up) + [2.0 + 4 * len(measured.sets)] * held_up
        whole = [2.0 + 5 * len(measured.sets)] * repeats
        return {name: Sample.of(links if name == "links" else whole) for name in chains}

    monkeypatch.setattr(evaluator._timer(True), "seconds", seconds)
    assert measured.rate(PROBLEM.heuristic("cuda")) == pytest.approx(5)
    assert asked == [4, 9]


def test_a_configuration_is_verified_and_timed(measured):
    trial = measured.attempt(PROBLEM.heuristic("cuda"))
    assert trial.problem == "" and 0 < trial.seconds < 1


def test_contenders_alternate_and_work_that_is_too_short_grows(monkeypatch):
    monkeypatch.setattr(QueueTimer, "_unqueued", lambda self, products: 1e-3 * products)
    timer, calls = QueueTimer(), []
    assert timer._matrix.shape == (512, 512) and timer.length == pytest.approx(2e-3)

    def once(run):
        calls.append(run)
        return 5.0 if run == "a" else 7.0, 4e-3

    monkeypatch.setattr(timer, "_once", once)
    found = timer.seconds({"a": "a", "b": "b"}, repeats=4)
    assert {name: sample.median for name, sample in found.items()} == {"a": 5.0, "b": 7.0}
    # One call each first, then rounds whose order is reversed by turns; and once more.
    assert calls == [*"ab", *"abbaabba", *"abbaabba"]
    assert timer.length == pytest.approx(7e-3)


def test_where_the_device_tells_the_time_the_work_before_is_no_part_of_it(monkeypatch):
    times, asked = iter([2_000, 5_000]), []
    timer = QueueTimer(busy=False)
    monkeypatch.setattr(timer, "_work", lambda products: asked.append("work") or mx.zeros(1))
    monkeypatch.setattr(timer, "_time", lambda: asked.append("time") or mx.array(next(times)))
    took, queued = timer._once(lambda y: asked.append("run") or [y])
    assert took == pytest.approx(3e-6) and 0 < queued < 1
    assert asked == ["work", "time", "run", "time"]


@pytest.mark.cuda
def test_the_clock_of_the_device_counts_nanoseconds():
    timer, chain = QueueTimer(), lambda y: [y @ timer._matrix for _ in range(8)]
    found = timer.seconds({"none": lambda y: [y], "chain": chain})
    assert found["none"].median < 1e-4 and found["chain"].median > 4 * timer._product


@pytest.mark.parametrize("ordered", [False, True])
def test_every_launch_has_a_set_of_its_own_and_waits_for_the_last(measured, ordered):
    assert len(measured.sets) > 2
    measured._ordered = ordered
    ran = []

    def path(inputs):
        ran.append(inputs)
        return inputs[0] + 1

    found = measured._round(path, measured.sets)(mx.zeros((1, 1)))
    assert len(found) == (len(measured.sets) if ordered else 1)
    ran = ran[: len(measured.sets)]  # traced once, and perhaps once more
    assert [list(map(id, inputs[1:])) for inputs in ran] == [
        list(map(id, others)) for _, *others in measured.sets
    ]
    # Where MLX starts in order what it is given, nothing needs to link one launch to the next.
    own = [inputs[0] is first for inputs, (first, *_) in zip(ran, measured.sets, strict=True)]
    assert all(own) if ordered else not any(own)


def test_a_chain_runs_its_rounds_one_after_the_other():
    seen = []

    def run(y):
        seen.append(y)
        return [y + 1, y + 2]

    assert evaluator._chain(run, 3)(0) == [1, 2, 3, 4, 5, 6] and seen == [0, 2, 4]


def test_paths_besides_stock_tell_whether_a_search_is_worth_it(measured, monkeypatch):
    ran = []

    def path(name, more=0):
        return lambda inputs: ran.append(name) or measured.family.stock(inputs, PROBLEM) + more

    # As a kernel may be that nobody could run on such a device.
    paths = {"stock": path("stock"), "another": path("another"), "wrong": path("wrong", 1)}
    monkeypatch.setattr(measured.family, "paths", lambda *_: paths, raising=False)
    # CUDA may take a minute to build the stock operator.
    assert 0 < measured.others() < 1 and set(ran) == {"another", "wrong"}
    ran.clear()
    (_,), found = measured.compared([measured.problem.heuristic("cuda")])
    assert set(found) == {"another", "stock"} <= {*ran, "another"}
    paths["dequantized"] = path("dequantized")  # which CUDA compiles for seconds
    times = measured.beside_stock(measured.problem.heuristic("cuda"), lambda *_: True)
    assert set(times) == {"kernel", "another", "stock"}


def test_a_cpu_runs_its_launches_one_by_one_without_other_work():
    timer = QueueTimer(busy=False)
    assert timer.length == 0
    found = timer.seconds({"exp": lambda y: [mx.exp(y)]}, repeats=3)
    assert 0 < found["exp"].median < 1 and found["exp"].count == 3
