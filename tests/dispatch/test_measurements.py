"""What operations are told: tuned configurations, faster paths and thresholds, where they hold."""

import threading
import timeit
from dataclasses import asdict, replace
from importlib.metadata import version

import mlx.core as mx
import pytest
from threads import switching

from mlx_qlayers import explain, use_backend
from mlx_qlayers.dispatch import measurements
from mlx_qlayers.dispatch.measurements import (
    choose_measured,
    configure,
    found,
    heuristics_only,
    questions,
)
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements import entries
from mlx_qlayers.measurements.entries import Entry
from mlx_qlayers.measurements.store import clear, save
from mlx_qlayers.measurements.thresholds import threshold
from mlx_qlayers.metal.attention.step import Step
from mlx_qlayers.metal.attention.step import question as asked_of_step
from mlx_qlayers.metal.records import RECORDS
from mlx_qlayers.ops.attention_step import attention_step, why_not
from mlx_qlayers.ops.quantized_route import DENSE, QMV, dense_is_worse, route
from mlx_qlayers.options import MatmulCall, PackedMatrix, Rotation
from mlx_qlayers.runtime import backend as backends
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.runtime.spec import Spec

FMT = Format(64, 4)
TIMES = "kernel 41.0 us, stock 63.0 us"
QUESTION = (1, 3584, 3584, mx.bfloat16, FMT)


@pytest.fixture(autouse=True)
def gpu(some_gpu):
    explain(reset=True)
    yield
    entries.unsaved.clear()


def heuristic(device="cuda"):
    return RECORDS["qmv"](*QUESTION).heuristic(device)


def keep(family="qmv", question=QUESTION, config=None, device="some_gpu", **changes):
    problem = RECORDS[family](*question)
    config = config or problem.heuristic("cuda")
    entry = Entry(
        config if isinstance(config, dict) else asdict(config),
        "kernel",
        4.1e-5,
        5e-5,
        9,
        problem.source,
        version("mlx"),
        {"kernel": 4.1e-5, "stock": 6.3e-5},
    )
    save(device, {problem.key: replace(entry, **changes)})
    return config


OTHER = replace(heuristic(), shares=4)


def test_a_heuristic_gives_way_to_what_was_found():
    assert configure("qmv", "cuda", *QUESTION) == heuristic()
    keep(config=OTHER)
    assert configure("qmv", "cuda", *QUESTION) == OTHER != heuristic()
    assert any(d.op == "tuning" and d.path == "kernel" for d in explain())
    assert clear() == 1 and configure("qmv", "cuda", *QUESTION) == heuristic()


def test_evidence_says_what_was_measured_where(monkeypatch):
    keep(config=OTHER, date="2026-11-22", command="mlx-qlayers tune")
    evidence = found("qmv", *QUESTION).evidence
    assert str(evidence) == f"measured here: {TIMES}"
    assert (evidence.device, evidence.date) == ("some_gpu", "2026-11-22")
    # The same file, as if the package held it.
    own, read = entries.own_entries("some_gpu"), entries.read
    shipped = {(entries.SHIPPED, "some_gpu"): own}
    monkeypatch.setattr(entries, "read", lambda *at: {**read(*at), **shipped.get(at, {})})
    monkeypatch.setattr(entries, "own_entries", lambda device: {})
    advance_epoch()
    evidence = found("qmv", *QUESTION).evidence
    assert str(evidence) == f"shipped result of some_gpu, 2026-11-22: {TIMES}"
    assert evidence.command == "mlx-qlayers tune"


def test_results_without_the_times_of_both_sides_still_count():
    """As the first versions wrote them."""
    keep(config=OTHER, paths={}, path="stock")
    assert str(found("qmv", *QUESTION).evidence) == "measured here: stock 41.0 us"


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "0" * 16},
        {"mlx": "0.1"},
        {"path": "modelled"},
        {"config": {"shares": 1}},
        {"config": asdict(OTHER) | {"another": 1}},
        {"config": asdict(OTHER) | {"shares": 3}},
        {"config": asdict(OTHER) | {"shares": "4"}},
        {"config": asdict(OTHER) | {"shares": True}},
        {"config": asdict(OTHER) | {"fragments": 2}},
        {"config": asdict(OTHER) | {"run": 8}},
    ],
    ids=str,
)
def test_what_is_stale_or_foreign_counts_for_nothing(changes):
    keep(**changes)
    assert found("qmv", *QUESTION) is None and configure("qmv", "cuda", *QUESTION) == heuristic()
    assert any(d.op == "tuning" and d.path == "ignored" for d in explain())


def test_a_configuration_that_its_class_refuses_counts_for_nothing():
    question = (1, 4, 2, 32, 64, 64, 64), mx.float16, True
    config = RECORDS["attention_forward"](*question).heuristic("cuda")
    keep("attention_forward", question, asdict(config) | {"tile": 7})
    assert configure("attention_forward", "cuda", *question) == config


def test_what_no_kernel_takes_is_not_launched(capsys):
    """A thread keeps a part of its sums for each of so many ways, and three do not divide a run."""
    question = (1, 64, 128, mx.float32, FMT)
    config = RECORDS["qmv"](*question).heuristic("host")
    keep("qmv", question, asdict(config) | {"ways": 3}, "cpu")
    assert configure("qmv", "host", *question) == config
    told = "the tuning result qmv 1x64x128 float32 affine-64-4-t of cpu is ignored: ways is 3"
    assert capsys.readouterr().err == f"mlx-qlayers: {told}\n"
    assert any(d.op == "tuning" and "ways is 3" in d.reason for d in explain())


def test_it_counts_for_its_device_dtype_format_and_shape_alone(monkeypatch):
    keep(config=OTHER)
    assert found("qmv", 2, *QUESTION[1:]) is None
    assert found("qmv", *QUESTION[:3], mx.float16, FMT) is None
    assert found("qmv", *QUESTION[:4], Format(32, 4)) is None
    assert configure("qmv", "metal", *QUESTION) == heuristic("metal")
    assert configure("qmv", "host", *QUESTION) == heuristic("host")
    assert found("qmv", *QUESTION, device="host") is None
    monkeypatch.setattr(entries, "device_name", lambda: "another_gpu")
    advance_epoch()
    assert found("qmv", *QUESTION) is None


def test_what_a_cpu_found_counts_on_the_host_backend():
    config = replace(heuristic("host"), outputs=8)
    keep(config=config, device="cpu")
    assert configure("qmv", "host", *QUESTION) == config
    assert found("qmv", *QUESTION, device="host").path == "kernel"


def test_rows_of_a_bucket_share_a_result():
    question = (512, 3584, 3584, mx.bfloat16, FMT, True)
    config = keep("qmm", question)
    assert found("qmm", 300, *question[1:])[:2] == ("kernel", config)
    # Fewer rows go by what was measured of more, with a configuration of their own; more do not.
    fewer = RECORDS["qmm"](256, *question[1:])
    assert found("qmm", 256, *question[1:])[:2] == ("kernel", fewer.heuristic("cuda"))
    assert found("qmm", 600, *question[1:]) is None


HEADS = (1, 8, 2)
PROMPT = (*HEADS, 2048, 2048, 64, 64), mx.bfloat16, True
EXPERTS = (64, 4, 2, 64, 128), mx.bfloat16, ("affine", 64, 4, "gate")
LATENT = (512, 1, 4, 64, 32), mx.float16, ()
STEP = mx.bfloat16, *HEADS, 4096, 64, 64


@pytest.mark.parametrize("path", ["kernel", "stock", "tensor", "codes"])
def test_sizes_between_two_that_were_measured_go_by_the_larger(path):
    shorter = ((*HEADS, 128, 1024, 64, 64), *PROMPT[1:]), ((*HEADS, 64, 4096, 64, 64), *PROMPT[1:])
    cases = [
        ("qmm", (512, 64, 64, mx.bfloat16, FMT, True), 0, (100, 600)),
        ("attention_forward", PROMPT, None, shorter),
        ("attention_step", STEP, 4, (2048, 8192)),
        ("attention_decode", (mx.bfloat16, 4, 64, 64, 0, 2, 4096), 6, (2048, 8192)),
    ]
    for family, question, at, sizes in cases:
        keep(family, question, path=path)
        answers = []
        for size in sizes:
            other = size if at is None else (*question[:at], size, *question[at + 1 :])
            answers.append(found(family, *other))
        assert answers[0].path == path and answers[1] is None, family


@pytest.mark.parametrize(
    ("family", "question", "other", "device"),
    [
        # Three rows of bfloat16 go without matrix units, and nine take two fragments.
        ("qmv", (4, *QUESTION[1:]), (3, *QUESTION[1:]), "metal"),
        ("qmv", (16, *QUESTION[1:]), (7, *QUESTION[1:]), "metal"),
        # So few keys are not split.
        ("attention_step", STEP, (*STEP[:4], 512, *STEP[5:]), "cuda"),
        # Half a tile of rows.
        (
            "qmm",
            (64, 64, 64, mx.bfloat16, FMT, True),
            (24, 64, 64, mx.bfloat16, FMT, True),
            "metal",
        ),
        # Rows that share experts seldom.
        ("experts", EXPERTS, ((2, *EXPERTS[0][1:]), *EXPERTS[1:]), "metal"),
        ("latent_attention", LATENT, ((100, *LATENT[0][1:]), *LATENT[1:]), "metal"),
    ],
)
def test_but_never_by_another_kernel_or_template(family, question, other, device, monkeypatch):
    monkeypatch.setattr(entries, "device_kind", lambda: device)
    keep(family, question, RECORDS[family](*question).heuristic(device), path="stock")
    assert found(family, *question, device=device).path == "stock"
    assert found(family, *other, device=device) is None


def test_rows_of_one_template_go_by_the_larger(monkeypatch):
    monkeypatch.setattr(entries, "device_kind", lambda: "metal")
    keep(question=(8, *QUESTION[1:]), config=RECORDS["qmv"](8, *QUESTION[1:]).heuristic("metal"))
    answers = [found("qmv", rows, *QUESTION[1:], device="metal") for rows in (3, 5, 6, 7, 9)]
    assert [each and each.path for each in answers] == [None, "kernel", "kernel", "kernel", None]


@pytest.mark.parametrize("path", ["dequantized", "uncompared"])
def test_but_not_by_what_depends_on_rows_or_was_not_compared(path):
    question = (64, 64, mx.bfloat16, FMT, True)
    keep("qmm", (512, *question), path=path)
    assert found("qmm", 512, *question).path == path and found("qmm", 128, *question) is None


def test_steps_go_to_stock_where_that_was_faster(monkeypatch):
    monkeypatch.setitem(backends.missing, "cuda", lambda: None)
    given = mx.bfloat16, 4, (1, 2, 4000, 64), 64
    assert why_not(*given) is None
    keep("attention_step", STEP)
    assert why_not(*given) is None
    keep("attention_step", STEP, path="stock")
    assert why_not(*given) == f"measured here: {TIMES}"
    with use_backend("cuda"):
        assert why_not(*given) is None


def test_a_second_look_takes_a_few_microseconds():
    keep(config=OTHER)
    asks = (
        lambda: found("qmv", *QUESTION, device="cuda"),
        lambda: configure("qmv", "cuda", *QUESTION),
        lambda: threshold("qmm_max_rows", "whole", device="cuda"),
    )
    for ask in asks:
        ask()
        assert min(timeit.repeat(ask, number=1000, repeat=10)) / 1000 < 4e-6


def test_heuristics_only_and_back():
    before, _ = backends.epoch.number, keep(config=OTHER)
    outside = backends.epoch.number
    with heuristics_only():
        assert configure("qmv", "cuda", *QUESTION) == heuristic()
        assert backends.epoch.number not in (before, outside)
    assert configure("qmv", "cuda", *QUESTION) == OTHER
    assert len({before, outside, backends.epoch.number}) == 3


def test_a_mode_is_that_of_its_thread():
    keep(config=OTHER)
    seen = []
    with heuristics_only(), questions() as asked:
        thread = threading.Thread(target=lambda: seen.append(configure("qmv", "cuda", *QUESTION)))
        thread.start()
        thread.join()
        assert seen == [OTHER] and configure("qmv", "cuda", *QUESTION) == heuristic()
        assert list(asked) == [("qmv", QUESTION)]


def test_threads_that_ask_while_results_change_get_one_of_them():
    wrong, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            if (config := configure("qmv", "cuda", *QUESTION)) not in (OTHER, heuristic()):
                wrong.append(config)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with switching(1e-5):
        for thread in threads:
            thread.start()
        for _ in range(20):
            keep(config=OTHER)
            clear()
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_questions_are_collected_once_each():
    found("qmv", *QUESTION)
    with questions() as asked:
        for _ in range(2):
            configure("qmv", "cuda", *QUESTION)
            found("qmv", *QUESTION)
    assert list(asked) == [("qmv", QUESTION)]
    configure("qmv", "cuda", 2, *QUESTION[1:])
    assert len(asked) == 1


def test_what_was_tuned_counts_for_its_own_device_alone():
    """This one is called some_gpu."""
    assert found("qmv", 1, 4608, 3584, mx.bfloat16, FMT, "3") is None


def chosen(monkeypatch, rows=1):
    """The route of a product where auto stands for CUDA."""
    monkeypatch.setitem(backends.missing, "cuda", lambda: None)
    monkeypatch.setitem(backends.missing, "metal", lambda: "not here")
    monkeypatch.setattr(measurements, "backend", backends.backend)
    x, w = Spec((rows, 3584), mx.bfloat16), Spec((3584, 448), mx.uint32)
    return route("product", MatmulCall(x, PackedMatrix(w, None), True, FMT))[:2]


def test_ops_take_the_kernel_where_it_won_and_say_so(monkeypatch):
    keep()
    (_, path, reason, evidence), kernel = chosen(monkeypatch)
    assert (path, kernel, evidence) == ("cuda", QMV, "measured here")
    assert f"by qmv, measured here: {TIMES}" in reason


def test_ops_take_stock_where_it_won_and_say_so(monkeypatch):
    keep(path="stock")
    choice, _ = chosen(monkeypatch)
    assert choice[1:] == ("reference", f"measured here: {TIMES}", "measured here")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ("cuda", "auto", "rule")),
        ("stock", ("reference", f"measured here: {TIMES}", "measured here")),
        ("kernel", ("cuda", f"auto, by its kernel, measured here: {TIMES}", "measured here")),
    ],
)
def test_an_operation_of_one_kernel_goes_by_what_won(path, expected, monkeypatch):
    monkeypatch.setitem(backends.missing, "cuda", lambda: None)
    monkeypatch.setattr(measurements, "backend", backends.backend)
    question = (512, 1, 4, 64, 32), mx.float16, ()
    if path:
        keep("latent_attention", question, path=path)
    asked = "latent_attention", (200, *question[0][1:]), *question[1:]
    assert choose_measured("op", ("cuda",), *asked)[1:] == expected
    assert choose_measured("op", (), *asked).path == "reference"


def test_ops_take_the_dense_product_where_it_won(monkeypatch):
    question = (64, 3584, 3584, mx.bfloat16, FMT, True)
    keep("qmm", question, path="dequantized")
    (_, path, reason, evidence), kernel = chosen(monkeypatch, rows=64)
    assert (path, kernel, evidence) == ("cuda", DENSE, "measured here")
    assert "measured here" in reason


@pytest.mark.parametrize("path", ["dequantized", "kernel", "stock"])
def test_several_matrices_at_once_go_by_what_won(path):
    keep("qmm", (512, 7168, 3584, mx.bfloat16, FMT, True), path=path)
    why, evidence = dense_is_worse(512, 7168, Spec((512, 3584), mx.bfloat16), FMT)
    assert why is None if path == "dequantized" else "measured here" in why
    assert evidence == "measured here"


def test_a_step_of_decoding_takes_what_was_found_for_its_buffers():
    question = (mx.bfloat16, 1, 28, 4, 1024, 128, 128)
    assert configure("attention_step", "cuda", *question) == Step(1, 4, 1, 32, 8)
    config = keep("attention_step", question, Step(1, 8, 1, 16, 4))
    assert configure("attention_step", "cuda", *question) == config
    q, buffer = mx.zeros((1, 1, 3584), mx.bfloat16), mx.zeros((1, 4, 768, 128))
    assert configure("attention_step", "cuda", *asked_of_step(q, buffer, 128)) == config


@pytest.mark.parametrize(
    ("size", "on_cuda", "on_metal"),
    [
        (512, Step(1, 4, 1, 32), Step(1, 8, 1, 16)),
        (2048, Step(1, 4, 1, 32, 16), Step(1, 8, 1, 16, 16)),
        (4096, Step(1, 4, 1, 32, 16), Step(1, 8, 1, 16, 16)),
        (65536, Step(1, 4, 2, 32, 32, teams=2), Step(1, 8, 1, 16, 22)),
    ],
)
def test_more_keys_are_divided_among_more_threads(size, on_cuda, on_metal):
    """A result for other buffers decides nothing."""
    keep("attention_step", (mx.bfloat16, 1, 28, 4, 1024, 128, 128), Step(1, 8, 1, 16, 4))
    question = (mx.bfloat16, 1, 28, 4, size, 128, 128)
    assert configure("attention_step", "cuda", *question) == on_cuda
    assert configure("attention_step", "metal", *question) == on_metal


def test_a_stored_configuration_that_an_m1_has_no_registers_for(machine, monkeypatch):
    """The heuristic's runs in its place, and a note says why."""
    machine("metal")
    monkeypatch.setattr(entries, "device_kind", lambda: "metal")
    launched = []

    def bind(launch):
        launched.append(dict(launch.template))
        return lambda arrays: [mx.zeros(shape) for shape in launch.output_shapes]

    monkeypatch.setattr("mlx_qlayers.runtime.metal.bind", bind)
    question = (mx.float32, 1, 8, 2, 256, 64, 64)
    config = keep("attention_step", question, Step(1, 4, 2, 16))
    assert configure("attention_step", "metal", *question) == config
    rows = [mx.zeros((1, 1, n * 64)) for n in (8, 2, 2)]
    buffers = [mx.zeros((1, 2, 256, 64))] * 4
    positions = mx.zeros(8, mx.int32)
    explain(reset=True)
    with use_backend("metal"):
        attention_step(*rows, *buffers, positions, scale=1.0, rotation=Rotation(64))
    assert [each["blocks"] for each in launched] == [1]
    assert "M1 and M2 have registers for 0" in str(explain())


def test_a_search_that_ended_early_is_no_verdict_on_stock(monkeypatch):
    before = chosen(monkeypatch)
    keep(config=OTHER, path="uncompared")
    assert configure("qmv", "cuda", *QUESTION) == OTHER
    assert chosen(monkeypatch) == before


def test_no_question_is_asked_about_kernels_that_a_cpu_does_not_choose(monkeypatch):
    monkeypatch.setattr(measurements, "backend", backends.backend)
    x, w = Spec((64, 3584), mx.bfloat16), Spec((3584, 448), mx.uint32)
    with use_backend("host"), questions() as asked:
        route("product", MatmulCall(x, PackedMatrix(w, None), True, FMT))
    # Which takes more than sixteen rows sixteen after sixteen, by qmv.
    assert [(family, rows) for family, (rows, *_) in asked] == [("qmv", 16)]
