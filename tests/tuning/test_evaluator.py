"""Measuring behind other work, with MLX's own operators in place of kernels."""

import time
from dataclasses import replace

import mlx.core as mx
import pytest
from counted import timed_by

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.step_record import AttentionStepRecord
from mlx_qlayers.metal.quantized_matmul.records import QmvRecord
from mlx_qlayers.tuning import evaluator
from mlx_qlayers.tuning.evaluator import Evaluator
from mlx_qlayers.tuning.queue_timer import OutOfTime, QueueTimer
from mlx_qlayers.tuning.timing import Sample


class Stock(QmvRecord):
    """A record without kernels of its own."""

    def bind(self, inputs, config):
        return lambda inputs: [mx.quantized_matmul(*inputs)]

    def paths(self, inputs):
        return {"stock": self.stock}

    def stock(self, inputs):
        return [mx.quantized_matmul(*inputs)]


RECORD = Stock(1, 256, 512, mx.float32, Format(64, 4))


class Timed(Evaluator):
    """On a GPU of which a chain starts with other work."""

    timed = None

    def _times(self, every, sets, repeats, *deadline):
        if self.timed is None:
            return super()._times(every, sets, repeats, *deadline)
        return self.timed(repeats)


@pytest.fixture
def timer(monkeypatch):
    """The clock of a device, which a test has tell what it will."""
    timer = QueueTimer(busy=False)
    timed_by(monkeypatch, lambda: timer)
    return timer


@pytest.fixture
def measured(machine, timer):
    machine.nvidia("some_gpu")
    return Timed(RECORD)


def test_the_work_before_and_the_links_are_left_out(measured, timer):
    each = evaluator._CHAIN
    measured._rounds = {len(measured.sets): each / 2, 1: each / 7}

    def seconds(chains, repeats, deadline):
        launches = 7 if warm else 2 * len(measured.sets)
        whole = {"links": 2.0, "stock": 2.0 + 4 * launches}
        warm.append(True)
        return {name: Sample.of([whole.get(name, 2.0 + 5 * launches)]) for name in chains}

    warm, timer.seconds = [], seconds
    config = RECORD.heuristic("cuda")
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


@pytest.mark.cuda
def test_the_clock_of_the_device_counts_nanoseconds():
    timer, chain = QueueTimer(), lambda y: [y @ timer._matrix for _ in range(8)]
    found = timer.seconds({"none": lambda y: [y], "chain": chain})
    assert found["none"].median < 1e-4 and found["chain"].median > 4 * timer._product


STEP = AttentionStepRecord(mx.float32, 2, 4, 2, 4096, 64, 64)


@pytest.mark.parametrize("bits", [0, 8])
def test_operators_of_mlx_write_a_token_into_caches_in_place(bits):
    """So that they are not charged for copies that nobody makes who decodes with them."""
    record = replace(STEP, group_size=64 * bits // 8, bits=bits)
    rates = evaluator.Evaluator(record, False)
    caches = rates.inputs[3 : 9 if bits else 5]
    size, before = sum(a.nbytes for a in caches), rates.inputs[5:7]
    del caches
    stock = record.paths(rates.inputs)["stock"]
    chain = rates._chain("stock", stock, [rates.inputs], 1)
    mx.eval(chain(mx.zeros((1,))))
    for _ in range(3):
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        mx.eval(chain(mx.zeros((1,))))
        # On a CPU products with packed keys copy those rows of each sequence that count.
        assert mx.get_peak_memory() - held < size * (1.5 if bits else 0.25)
    # And what the kernel gives for an append buffer is the next launch's.
    config = record.heuristic("host")
    kernel = rates._chain("kernel", rates._path(config), [rates.inputs], 1)
    mx.eval(kernel(mx.zeros((1,))))
    assert rates.inputs[5:7] is not before and not rates._verified("kernel", rates._path(config))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_every_output_is_compared(wrong):
    rates = evaluator.Evaluator(STEP, False)
    path = rates._path(STEP.heuristic("host"))

    def damaged(inputs):
        outputs = path(inputs)
        outputs[wrong] = outputs[wrong] * 1.1
        return outputs

    assert rates._verified("kernel", path) is None
    assert "wrong by" in rates._verified("kernel", damaged)


class Slow(QueueTimer):
    """A clock that other work takes milliseconds of."""

    def _unqueued(self, products):
        assert super()._unqueued(1) > 0
        return 1e-3 * products

    def _once(self, run):
        return 1.0, 0.0


def test_what_is_not_done_in_time_is_left(measured):
    times, asked = {"kernel": Sample(1.0, 0.9, 1.1, 5), "stock": Sample.of([1.0] * 5)}, []

    def timed(repeats):
        asked.append(repeats)
        if len(asked) > rounds:
            raise OutOfTime
        return times

    measured.timed = timed
    rounds, config = 1, RECORD.heuristic("cuda")
    # Five repeats of each are a verdict, fewer are none.
    assert measured.beside_stock(config) == times and asked == [5, 9]
    rounds = 0
    with pytest.raises(OutOfTime):
        measured.beside_stock(config)
    measured.deadline = time.monotonic()
    with pytest.raises(OutOfTime):
        measured.attempt(config)
    with pytest.raises(OutOfTime):
        Evaluator(RECORD, deadline=time.monotonic())
    with pytest.raises(OutOfTime):
        Slow().seconds({"a": "a"}, deadline=time.monotonic())


def test_a_cpu_runs_its_launches_one_by_one_without_other_work():
    timer = QueueTimer(busy=False)
    assert timer.length == 0
    found = timer.seconds({"exp": lambda y: [mx.exp(y)]}, repeats=3)
    assert 0 < found["exp"].median < 1 and found["exp"].count == 3
