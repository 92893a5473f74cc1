"""What launchers find: tuned configurations and verdicts, only where they hold."""

import timeit
from dataclasses import asdict, replace
from importlib.metadata import version

import mlx.core as mx
import pytest

from mlx_qlayers import explain
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.step import Step, configure
from mlx_qlayers.metal.attention.step import question as asked_of_step
from mlx_qlayers.metal.quantized_matmul.qmv import qmv_config
from mlx_qlayers.ops import quantized_paths
from mlx_qlayers.runtime import backend as backends
from mlx_qlayers.tuning import lookup, store
from mlx_qlayers.tuning.families import ATTENTION_STEP, FEW_ROWS, QMM
from mlx_qlayers.tuning.lookup import found, heuristics_alone, questions
from mlx_qlayers.tuning.store import Entry, save, source_hash

FMT = Format(64, 4)
QUESTION = (1, 3584, 3584, mx.bfloat16, FMT)
NAME = "qmv"


@pytest.fixture(autouse=True)
def gpu(tmp_path, monkeypatch):
    """A machine that says it has an NVIDIA GPU, and an empty store."""
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(store, "_SHIPPED", tmp_path / "shipped")
    for module in (lookup, store):
        monkeypatch.setattr(module, "device_name", lambda: "some_gpu")
        monkeypatch.setattr(module, "device_kind", lambda: "cuda")
    store.forget()
    explain(reset=True)
    yield
    store._unsaved.clear()
    monkeypatch.undo()
    store.forget()


def heuristic(device="cuda"):
    return qmv_config.__wrapped__.__wrapped__(device, *QUESTION)


def keep(family=FEW_ROWS, question=QUESTION, config=None, **changes):
    config = config or replace(heuristic(), simds=4)
    entry = Entry(
        asdict(config), "kernel", 1e-5, 2e-5, 9, source_hash(*family.kernels), version("mlx")
    )
    save("some_gpu", {family.key(family.asked(*question)): replace(entry, **changes)})
    return config


def test_a_heuristic_gives_way_to_what_was_found():
    assert qmv_config("cuda", *QUESTION) == heuristic()
    config = keep()
    assert qmv_config("cuda", *QUESTION) == config != heuristic()
    assert any(d.op == "tuning" and d.path == "kernel" for d in explain())


@pytest.mark.parametrize("changes", [{"source": "0" * 16}, {"mlx": "0.1"}], ids=str)
def test_what_is_stale_counts_for_nothing(changes):
    keep(**changes)
    assert found(NAME, *QUESTION) is None and qmv_config("cuda", *QUESTION) == heuristic()


def test_it_counts_for_its_device_dtype_format_and_shape_alone(monkeypatch):
    keep()
    assert found(NAME, 2, *QUESTION[1:]) is None
    assert found(NAME, *QUESTION[:3], mx.float16, FMT) is None
    assert found(NAME, *QUESTION[:4], Format(32, 4)) is None
    assert qmv_config("metal", *QUESTION) == heuristic("metal")
    assert qmv_config("host", *QUESTION) == heuristic("host")
    monkeypatch.setattr(lookup, "device_name", lambda: "another_gpu")
    store.forget()
    assert found(NAME, *QUESTION) is None


def test_rows_of_a_bucket_share_a_result():
    question = (512, 3584, 3584, mx.bfloat16, FMT, True)
    config = QMM.heuristic(QMM.asked(*question), "cuda")
    keep(QMM, question, config)
    assert found(QMM.name, 300, *question[1:]) == ("kernel", config)
    assert found(QMM.name, 256, *question[1:]) is None


def test_a_second_look_takes_less_than_two_microseconds():
    keep()
    for ask in (lambda: found(NAME, *QUESTION), lambda: qmv_config("cuda", *QUESTION)):
        assert min(timeit.repeat(ask, number=1000, repeat=10)) / 1000 < 2e-6


def test_heuristics_alone_and_back():
    config = keep()
    with heuristics_alone():
        assert qmv_config("cuda", *QUESTION) == heuristic()
    assert qmv_config("cuda", *QUESTION) == config


def test_questions_are_collected_once_each():
    found(NAME, *QUESTION)
    with questions() as asked:
        for _ in range(2):
            qmv_config("cuda", *QUESTION)
            found(NAME, *QUESTION)
    assert list(asked) == [(NAME, QUESTION)]
    qmv_config("cuda", 2, *QUESTION[1:])
    assert len(asked) == 1


def way(monkeypatch, rows=1):
    """The way of a product where auto stands for CUDA, and the reason for it."""
    monkeypatch.setitem(backends._missing, "cuda", lambda: None)
    monkeypatch.setitem(backends._missing, "metal", lambda: "not here")
    explain(reset=True)
    x, w = mx.zeros((rows, 3584), mx.bfloat16), mx.zeros((3584, 448), mx.uint32)
    chosen = quantized_paths.way("product", x, w, mx.zeros((3584, 56), mx.bfloat16), True, FMT)
    (reason,) = (d.reason for d in explain() if d.op == "product")
    return chosen, reason


def test_ops_take_the_kernel_where_it_won_and_say_so(monkeypatch):
    keep()
    chosen, reason = way(monkeypatch)
    assert chosen == ("cuda", quantized_paths.FEW_ROWS)
    assert "as tuned here" in reason


def test_ops_take_stock_where_it_won_and_say_so(monkeypatch):
    keep(path="stock")
    chosen, reason = way(monkeypatch)
    assert chosen.path == "ops" and "stock was faster when tuned here" in reason


def test_ops_take_the_dense_product_where_it_won(monkeypatch):
    question = (64, 3584, 3584, mx.bfloat16, FMT, True)
    config = QMM.heuristic(QMM.asked(*question), "cuda")
    keep(QMM, question, config, path="dequantized")
    chosen, reason = way(monkeypatch, rows=64)
    assert chosen == ("cuda", quantized_paths.DENSE) and "as tuned here" in reason


@pytest.mark.parametrize("path", ["dequantized", "kernel", "stock"])
def test_several_matrices_at_once_go_by_what_won(path):
    question = (512, 7168, 3584, mx.bfloat16, FMT, True)
    config = QMM.heuristic(QMM.asked(*question), "cuda")
    keep(QMM, question, config, path=path)
    why = quantized_paths.dense_is_worse(512, 7168, mx.zeros((512, 3584), mx.bfloat16), FMT)
    assert why is None if path == "dequantized" else "faster when tuned here" in why


def test_a_step_of_decoding_takes_what_was_found_for_its_buffers():
    question = (mx.bfloat16, 1, 28, 4, 1024, 128, 128)
    assert configure("cuda", *question) == Step(16, 4)
    config = keep(ATTENTION_STEP, question, Step(8, 2, 4))
    assert configure("cuda", *question) == config
    q, buffer = mx.zeros((1, 1, 3584), mx.bfloat16), mx.zeros((1, 4, 768, 128))
    assert configure("cuda", *asked_of_step(q, buffer, 128)) == config


def test_computed_costs_are_no_verdict_on_stock(monkeypatch):
    before = way(monkeypatch)
    config = keep(path="modelled")
    store.forget()
    assert qmv_config("cuda", *QUESTION) == config
    assert way(monkeypatch) == before
