"""Calibration: what is measured where a model is converted, what is taken, what is kept."""

import fcntl
import json
import shutil
import time
from math import inf
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from counted import rated_by
from machine import on_a_gpu, ships
from mlx_lm import load as load_stock

from mlx_qlayers import convert_model, explain, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements import entries
from mlx_qlayers.measurements.store import clear, listed
from mlx_qlayers.metal.quantized_matmul.records import QmvRecord
from mlx_qlayers.tuning import calibrate as module
from mlx_qlayers.tuning import measuring
from mlx_qlayers.tuning.calibrate import Calibration, calibrate
from mlx_qlayers.tuning.search import Trial
from mlx_qlayers.tuning.timing import Sample

FMT = Format(64, 4)


@pytest.fixture(autouse=True)
def on_conversion(monkeypatch):
    monkeypatch.setenv("MLX_QLAYERS_CALIBRATE", "1")


@pytest.fixture
def model(tiny_model):
    """A converted model of which nothing was measured."""
    model = load_stock(str(tiny_model))[0]
    convert_model(model, calibrate=False, verify=False)
    return model


def stored():
    return listed().get("cpu", {})


class Timed:
    """An evaluator without a clock: the kernel takes 1, stock what a test says."""

    stock = Sample(2.0, 1.9, 2.1, 3)
    kernel = Sample(1.0, 0.9, 1.1, 3)
    problem_with, lost = "", ""
    asked = 0

    def __init__(self, record, checked, deadline):
        self.record, self.device, self.truth_seconds = record, "host", 0.5

    def launch(self, config):
        pass

    def attempt(self, config, rated):
        type(self).asked += 1
        return Trial(config, inf, self.problem_with)

    def beside_stock(self, config):
        return {"kernel": self.kernel, "stock": self.stock}


@pytest.fixture
def timed(monkeypatch):
    """Ratings as a test sets them."""
    rates = type("Rates", (Timed,), {})
    rated_by(monkeypatch, rates)
    return rates


def test_conversions_measure_the_models_shapes_and_use_and_tell_what_they_found(tiny_model):
    mx.random.seed(7)
    expected = mx.random.normal((4,))
    left = True
    while left:  # more than a conversion's time takes
        model = load_stock(str(tiny_model))[0]
        mx.random.seed(7)
        report = convert_model(model, verify=False)
        assert mx.array_equal(mx.random.normal((4,)), expected)
        left = "left to the next" in report.calibration
    assert report.calibration.startswith("measured here: kernels for ")
    assert report.calibration in report.brief() and report.calibration in report.summary()
    assert "ms of a token" in report.calibration and not explain()
    keys = set(stored())
    assert "qmv 1x128x192 bfloat16 affine-64-4-t-residual" in keys
    assert "attention_decode 2x2x512x32x32 bfloat16 bits-0" in keys
    model(mx.zeros((1, 1), mx.int32))
    reasons = [d.reason for d in explain() if d.evidence == "measured"]
    assert any("measured here: kernel " in r and " us, stock " in r for r in reasons)
    with use_backend("host"):  # forced: there is nothing to choose
        assert not calibrate(model).measured


def test_what_was_measured_is_not_measured_again(model, timed):
    first = calibrate(model)
    assert first.measured and first.left == 0 and timed.asked == len(first.measured)
    asked, again = timed.asked, calibrate(model)
    assert again.measured == first.measured and not again.seconds and timed.asked == asked
    assert "; measured for" in str(first) and "; measured for" not in str(again)


def test_a_token_comes_first_and_the_budget_leaves_the_rest(model, timed):
    problems = [*module._counted(model)]
    order = [(problem.stage, problem.size) for problem in problems]
    assert order == sorted(order) and {stage for stage, _ in order} == {0, 1}
    products = [problem for problem in problems if order[0] == (problem.stage, problem.size)]
    assert {problem.rows for problem in products} == {1}
    none = calibrate(model, budget_s=0)
    assert none == Calibration((), len(problems), none.seconds) and not stored()


@pytest.mark.parametrize(
    ("kernel", "path"),
    [
        (Sample(1.9, 1.9, 1.9, 3), "kernel"),
        (Sample(1.95, 1.95, 1.95, 3), "stock"),  # less than 3%
        (Sample(1.5, 1.0, 1.99, 3), "stock"),  # not sure
        (Sample(2.1, 2.1, 2.1, 3), "stock"),
    ],
)
def test_a_kernel_is_taken_where_it_is_surely_faster(model, timed, kernel, path):
    timed.kernel, timed.stock = kernel, Sample(2.0, 2.0, 2.0, 3)
    assert {each.path for each in calibrate(model).measured} == {path}
    assert {entry.path for entry in stored().values()} == {path}


def test_the_fastest_of_the_kernels_is_taken(model, timed, monkeypatch):
    """As those of tensor operations, on an M5."""
    times = {"kernel": timed.kernel, "tensor": Sample(0.5, 0.5, 0.5, 3), "stock": timed.stock}
    monkeypatch.setattr(timed, "beside_stock", lambda *_: times)
    found = calibrate(model)
    count = len(found.measured)
    assert {each.path for each in found.measured} == {"tensor"}
    assert f"kernels for {count} of {count} shapes" in str(found)
    monkeypatch.setattr(timed, "beside_stock", lambda *_: {})  # where one of them hangs
    clear()
    assert {each.path for each in calibrate(model).measured} == {"stock"}


def test_a_wrong_kernel_is_left_for_good(model, timed):
    timed.problem_with = "wrong by 1"
    assert {each.path for each in calibrate(model).measured} == {"stock"}
    assert all(entry.paths == {"stock": 0.5} for entry in stored().values())
    assert all("wrong by 1" in d.reason for d in explain() if d.op == "calibration")


def test_a_kernel_that_hangs_ends_it_and_is_never_tried_again(model, timed):
    timed.problem_with = timed.lost = "did not come back"
    with pytest.raises(RuntimeError, match="MLX_QLAYERS_CALIBRATE=0"):
        calibrate(model)
    assert len(stored()) == 1


def test_experts_and_latent_rows_are_measured_too(machine):
    """On an Apple GPU, for which nothing ships; here one whose kernels give zeros."""
    model = build("deepseek_v3", ARCHITECTURES["deepseek_v3"], mx.bfloat16)
    with use_backend("reference"):
        convert_model(model, verify=False, calibrate=False)
    machine.apple("applegpu_g16s")
    machine.giving_zeros("metal")
    with on_a_gpu(), use_backend("metal"):
        keys = [record.key for record in module._counted(model)]
    for rows in (1, 2, 4, 8, 16):
        # Rows that share experts often are added up behind the launch.
        kinds = "gate", "sum" if rows < 4 else "each"
        wanted = [f"experts {rows}x4x2x{n}x{k}" for n, k in ((64, 128), (128, 64))]
        for name, kind in zip(wanted, kinds, strict=True):
            assert f"{name} bfloat16 mxfp4-32-4-{kind}" in keys
        assert any(key.startswith(f"router {rows}x4 bfloat16 top_k=2") for key in keys)
    # Of prompts whose rows choose two of four experts.
    rows = [key.split("x")[0] for key in keys if key.startswith("gather_qmm ")]
    assert {*rows} == {f"gather_qmm {2 * tokens}" for tokens in (64, 512, 2048)}
    assert {f"latent_attention {n}x1x4x64x32 bfloat16" for n in (512, 4096, 65536)} < {*keys}


def test_an_interrupt_loses_nothing(model, timed, monkeypatch):
    def attempt(self, config, rated):
        timed.asked += 1
        if timed.asked == 3:
            raise KeyboardInterrupt
        return Trial(config, 1.0)

    monkeypatch.setattr(timed, "attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model)
    assert len(stored()) == 2
    json.loads((entries.user_folder() / "cpu.json").read_text())
    assert calibrate(model).left == 0


def test_two_processes_do_not_measure_at_once(model, timed, folder):
    folder.mkdir(parents=True)
    with open(folder / "cpu.measuring", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waited = calibrate(model, budget_s=0.2)
    assert waited.left and not waited.measured and not timed.asked
    assert calibrate(model).left == 0


def test_it_can_be_left_out(tiny_model, timed, monkeypatch):
    model = load_stock(str(tiny_model))[0]
    assert convert_model(model, verify=False, calibrate=False).calibration == ""
    monkeypatch.setenv("MLX_QLAYERS_CALIBRATE", "0")
    assert calibrate(model) == Calibration() and str(Calibration()) == ""
    assert not timed.asked and not stored()


def test_a_model_of_another_kind_is_measured_by_its_matrices(timed):
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    nn.quantize(model, 32, 4)
    convert_model(model, verify=False)
    fmt = "float32 affine-32-4-t"
    wanted = {f"qmv {rows}x{n}x{k} {fmt}" for rows in (1, 2, 4, 8, 16) for n, k in SHAPES}
    assert set(stored()) == wanted


def test_what_the_package_has_results_of_is_not_measured(model, timed, folder, monkeypatch):
    calibrate(model)
    data = shutil.copytree(entries.SHIPPED, folder.with_name("data"))
    shipped, own = (json.loads((at / "cpu.json").read_text()) for at in (data, folder))
    token = {key: each for key, each in own["entries"].items() if key.startswith("qmv 1x")}
    for whole in (True, False):
        clear()
        timed.asked = 0
        (data / "cpu.json").write_text(
            json.dumps(shipped | {"entries": shipped["entries"] | token})
        )
        ships(monkeypatch, data)
        assert (calibrate(model) == Calibration()) == (timed.asked == 0) == whole
        token.popitem()


def test_another_process_measures_until_the_deadline_and_no_longer(tmp_path):
    problems = [QmvRecord(rows, 64, 64, mx.float32, FMT) for rows in (1, 2)]
    start = time.monotonic()
    assert not list(measuring._of_process(problems, start + 0.1))
    assert time.monotonic() - start < 1
    found = list(measuring._of_process(problems, time.monotonic() + 60))
    assert [each.key for each in found] == [problem.key for problem in problems]
    assert all(set(each.entry.paths) == {"kernel", "stock"} for each in found)
    assert not any(each.note or each.lost for each in found)
    (failed,) = measuring._of_process([SimpleNamespace(key="none")], time.monotonic() + 60)
    assert failed.entry is None and "AttributeError" in failed.note[1]


SHAPES = ((96, 64), (32, 96))


def test_a_cpu_measures_large_products_in_part():
    whole = QmvRecord(8, 37888, 3584, mx.bfloat16, FMT, "norm-gate")
    part = whole.part()
    assert part.n % 48 == 0 and part.n * part.k <= 1 << 20 < 2 * part.n * part.k
    small = QmvRecord(8, 128, 64, mx.bfloat16, FMT)
    assert small.part() is small
