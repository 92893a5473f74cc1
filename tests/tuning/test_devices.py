"""Calibration of a 7B model on Macs that are simulated: a clock that models of them move on.

A model has what a device multiplies and reads a second, and what a launch, a call and a compilation
take. Which problems there are, their order, texts, repeats and deadlines are the package's own.
"""

import random
import re
import time
from dataclasses import fields, replace
from typing import NamedTuple

import mlx.core as mx
import pytest
from counted import rated_by, timed_by
from machine import on_a_gpu, zeros
from mlx_lm.models import qwen2
from recorded_gpu import without_numbers

from mlx_qlayers import convert_model, use_backend
from mlx_qlayers.dispatch.measurements import found, lookup
from mlx_qlayers.measurements import entries
from mlx_qlayers.metal.attention.records import AttentionDecodeRecord
from mlx_qlayers.metal.attention.step_record import AttentionStepRecord
from mlx_qlayers.metal.quantized_matmul.records import QmvRecord
from mlx_qlayers.runtime import tensor_ops
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.tuning import calibrate as module
from mlx_qlayers.tuning import evaluator
from mlx_qlayers.tuning.calibrate import calibrate
from mlx_qlayers.tuning.evaluator import Evaluator
from mlx_qlayers.tuning.queue_timer import QueueTimer
from tests import apple_gpu


class Chip(NamedTuple):
    """A device: what it does a second, and seconds a token of a kernel's text."""

    name: str
    architecture: str
    operations: float
    bytes: float
    compilation: float


# Matrices at three quarters of the peak, and memory at 85%; the M5 multiplies by matrix units.
CHIPS = (
    Chip("Apple M1", "applegpu_g13g", 2.0e12, 58e9, 1.46e-5),
    Chip("Apple M4 Max", "applegpu_g16s", 12e12, 464e9, 1.02e-5),
    Chip("Apple M5", "applegpu_g17g", 10e12, 130e9, 8.7e-6),
)
# Seconds of a launch behind another, of the call that starts some and waits, of Python for one, of
# a compilation besides its text, and of the trace of a model.
LAUNCH, CALL, PYTHON, COMPILER, TRACE = 4e-6, 3e-4, 1e-5, 0.04, 0.2
# Kernels beside stock: times that are sure at once, and one in eight that takes all repeats.
RATIOS = 0.965, *(0.7,) * 4, *(1.2,) * 3
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 2, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


class Mac:
    """A clock, and what moves it on."""

    def __init__(self, chip):
        self.chip, self.now, self.noise, self.measured = chip, 1000.0, random.Random(7), []
        self.begin()

    def begin(self):
        """Another process, which first traces a model and launches nothing."""
        self.texts, self.uncompiled, self.measures = set(), 0.0, False

    def traced(self):
        """It has traced the model, and measures."""
        self.now += TRACE * (not self.measures)
        self.measures = True

    def kernel(self, **made):
        """In the place of ``mx.fast.metal_kernel``: kernels give zeros."""

        def launch(**call):
            text = apple_gpu.launch_of(made, call).text if self.measures else None
            if text and text not in self.texts:
                self.texts.add(text)
                tokens = len(re.findall(r"\w+|[^\w\s]", text))
                self.uncompiled += COMPILER + self.chip.compilation * tokens
            return zeros(**call)

        return launch

    def seconds(self, problem, path):
        """The seconds of a launch of a path."""
        rows = problem.rows if isinstance(problem, QmvRecord) else 0
        work = 4.0 * rows * problem.n * problem.k if rows else problem.operations()
        stock = LAUNCH + max(problem.bytes() / self.chip.bytes, work / self.chip.operations)
        return stock * (
            1.0 if path in ("stock", "truth") else RATIOS[sum(map(ord, problem.key)) % 8]
        )


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def mac(request, machine, monkeypatch):
    mac = Mac(request.param)

    class Simulated(Evaluator):
        def __init__(self, *given):
            mac.traced()
            super().__init__(*given)

        def _seconds(self, name, arrays, launches=1, patience=0.0):
            if mac.now > self.deadline:
                raise evaluator.OutOfTime
            chip = mac.chip
            if name in ("inputs", "copies"):  # random numbers, or one after the other
                took = sum(each.nbytes for each in arrays) * 4 / chip.bytes
            else:
                took = launches * mac.seconds(self.record, name) + mac.uncompiled
                took, mac.uncompiled = took * (2 if name == "truth" else 1), 0.0
            mac.now += took + CALL
            return took + CALL

        def _error(self, outputs):
            return None

        def _chain(self, name, path, sets, rounds=1):
            count = rounds * len(sets)
            each = 0.0 if name == "links" else mac.seconds(self.record, name)
            return lambda y: (count * (LAUNCH + each), count * PYTHON)

        def beside_stock(self, config):
            found = super().beside_stock(config)
            mac.measured.append((self.record, [each.count for each in found.values()]))
            return found

    class Timer(QueueTimer):
        def _unqueued(self, products):
            took = CALL + products * 2.0 * self._matrix.shape[0] ** 3 / mac.chip.operations
            mac.now += 4 * took
            return took

        def _once(self, run):
            took, queued = run(None)
            took = CALL + max(self.length + took, queued) * mac.noise.gauss(1.0, 0.004)
            mac.now += took
            return took, queued

    machine.apple(mac.chip.architecture, name=mac.chip.name)
    tensor_ops.missing_codes()  # asks a kernel
    monkeypatch.setattr(mx.fast, "metal_kernel", mac.kernel)
    rated_by(monkeypatch, Simulated)
    timed_by(monkeypatch, Timer)
    monkeypatch.setattr(time, "monotonic", lambda: mac.now)
    monkeypatch.setattr(time, "perf_counter", lambda: mac.now)
    monkeypatch.setenv("MLX_QLAYERS_CALIBRATE", "1")
    advance_epoch()
    with on_a_gpu():
        yield mac


def converted():
    """The model in a process of its own."""
    model = without_numbers(qwen2.Model(qwen2.ModelArgs(**QWEN)))
    with use_backend("reference"):
        convert_model(model, verify=False, calibrate=False)
    return model


def undecided(asked):
    """The keys of one token, or of several at once, without a measurement."""
    every = []
    for each in asked:
        if isinstance(each, QmvRecord):
            every += map(each.at, range(1, 17))
        elif isinstance(each, AttentionDecodeRecord | AttentionStepRecord):
            some = [replace(each, batch=batch) for batch in (1, 5, 32, 64)]
            every += [one.at(n) for one in some for n in (1, 200, 300, 3000, 50_000, 200_000)]

    def key_of(record):
        return [getattr(record, field.name) for field in fields(record)]

    return [each.key for each in every if found(each.family, *key_of(each)) is None]


def test_few_conversions_decide_everything(mac, record_property):
    took = []
    name, asked = entries.file_of("metal"), module._counted(converted())
    assert name == mac.chip.name.replace(" ", "_")
    # By the guess of its compiler an M1 needs one more.
    for conversion in range(4 if mac.chip.name == "Apple M1" else 3):
        mac.begin()
        model, start = converted(), mac.now
        report = calibrate(model)
        took.append(mac.now - start)
        assert took[-1] <= 6
        known = entries.own_entries(name)
        if conversion == 0:
            token = {each.key for each in asked if each.stage == 0}
            # Five products, attention of two kinds to 512, 4,096 and 65,536 keys, and one to 256.
            assert len(token) == 12 and token <= {*known}
    title = "table: Calibration of a 7B: seconds of three conversions, problems"
    record_property(title, [mac.chip.name, *(f"{seconds:.1f}" for seconds in took[:3]), len(asked)])
    assert report.left == 0 and {each.key for each in asked} == {*known}
    order = [(problem.stage, problem.size) for problem, _ in mac.measured]
    assert order == sorted(order) and all(min(counts) >= 5 for _, counts in mac.measured)
    # A prompt that would take an M1 too long is left to the tuner; an M4 Max takes all of them.
    left = {key for key, entry in known.items() if entry.path == entries.COMPUTED}
    assert len(left) + len(mac.measured) == len(known)
    assert all(lookup(each, name) is None for each in asked if each.key in left)
    assert undecided(asked) == []
    slow = "qmm 2048x18944x3584 bfloat16 affine-64-4-t"
    assert {"Apple M1": slow in left, "Apple M4 Max": not left}.get(mac.chip.name, True)
