"""The answers to operations: tuned configurations, faster paths and thresholds, where they hold."""

import threading
from dataclasses import asdict, replace

import mlx.core as mx
import pytest
from stored_results import FMT, KEY, OTHER, TIMES, heuristic, keep
from threads import switching

from mlx_qlayers import explain, use_backend
from mlx_qlayers.dispatch.measurements import collected_records, configure, found, untuned
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements.store import clear
from mlx_qlayers.metal.records import RECORDS
from mlx_qlayers.ops.attention_step import why_not
from mlx_qlayers.runtime import backend as backends

pytestmark = pytest.mark.usefixtures("forgetful_gpu")


def test_a_heuristic_gives_way_to_what_was_found_and_evidence_says_where():
    assert configure("qmv", "cuda", *KEY) == heuristic()
    keep(config=OTHER, date="2026-11-22", command="mlx-qlayers tune")
    assert configure("qmv", "cuda", *KEY) == OTHER != heuristic()
    assert any(d.op == "tuning" and d.path == "kernel" for d in explain())
    evidence = found("qmv", *KEY).evidence
    assert str(evidence) == f"measured here: {TIMES}"
    assert (evidence.device, evidence.date) == ("some_gpu", "2026-11-22")
    assert evidence.command == "mlx-qlayers tune"
    assert clear() == 1 and configure("qmv", "cuda", *KEY) == heuristic()


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "0" * 16},
        {"mlx": "0.1"},
        {"path": "modelled"},
        {"config": {"simds_k": 1}},
        {"config": asdict(OTHER) | {"another": 1}},
        {"config": asdict(OTHER) | {"simds_k": 3}},
        {"config": asdict(OTHER) | {"simds_k": "4"}},
        {"config": asdict(OTHER) | {"simds_k": True}},
        {"config": asdict(OTHER) | {"fragments": 2}},
        {"config": asdict(OTHER) | {"run": 8}},
    ],
    ids=str,
)
def test_what_is_stale_or_foreign_counts_for_nothing(changes):
    keep(**changes)
    assert found("qmv", *KEY) is None and configure("qmv", "cuda", *KEY) == heuristic()
    assert any(d.op == "tuning" and d.path == "ignored" for d in explain())


def test_what_no_kernel_takes_is_not_launched(capsys):
    """A thread keeps a part of its sums for each of so many ways, and three do not divide a run."""
    key = (1, 64, 128, mx.float32, FMT)
    config = RECORDS["qmv"](*key).heuristic("host")
    keep("qmv", key, asdict(config) | {"ways": 3}, "cpu")
    assert configure("qmv", "host", *key) == config
    told = "the tuning result qmv 1x64x128 float32 affine-64-4-t of cpu is ignored: ways is 3"
    assert capsys.readouterr().err == f"mlx-qlayers: {told}\n"
    assert any(d.op == "tuning" and "ways is 3" in d.reason for d in explain())


def test_it_counts_for_its_device_dtype_format_and_shape_alone(machine):
    keep(config=OTHER)
    assert found("qmv", 2, *KEY[1:]) is None
    assert found("qmv", *KEY[:3], mx.float16, FMT) is None
    assert found("qmv", *KEY[:4], Format(32, 4)) is None
    assert configure("qmv", "metal", *KEY) == heuristic("metal")
    assert configure("qmv", "host", *KEY) == heuristic("host")
    assert found("qmv", *KEY, device="host") is None
    machine.nvidia("another_gpu")
    assert found("qmv", *KEY) is None


def test_what_a_cpu_found_counts_on_the_host_backend():
    config = replace(heuristic("host"), outputs=8)
    keep(config=config, device="cpu")
    assert configure("qmv", "host", *KEY) == config
    assert found("qmv", *KEY, device="host").path == "kernel"


def test_rows_of_a_bucket_share_a_result():
    key = (512, 3584, 3584, mx.bfloat16, FMT, True)
    config = keep("qmm", key)
    assert found("qmm", 300, *key[1:])[:2] == ("kernel", config)
    # Fewer rows go by what was measured of more, with a configuration of their own; more do not.
    fewer = RECORDS["qmm"](256, *key[1:])
    assert found("qmm", 256, *key[1:])[:2] == ("kernel", fewer.heuristic("cuda"))
    assert found("qmm", 600, *key[1:]) is None


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
    for family, key, at, sizes in cases:
        keep(family, key, path=path)
        answers = []
        for size in sizes:
            other = size if at is None else (*key[:at], size, *key[at + 1 :])
            answers.append(found(family, *other))
        assert answers[0].path == path and answers[1] is None, family


@pytest.mark.parametrize(
    ("family", "key", "other", "device"),
    [
        # Three rows of bfloat16 go without matrix units, and nine take two fragments.
        ("qmv", (4, *KEY[1:]), (3, *KEY[1:]), "metal"),
        ("qmv", (16, *KEY[1:]), (7, *KEY[1:]), "metal"),
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
def test_but_never_by_another_kernel_or_template(family, key, other, device, machine):
    machine.gpu(device, {"architecture": "some_gpu"})
    keep(family, key, RECORDS[family](*key).heuristic(device), path="stock")
    assert found(family, *key, device=device).path == "stock"
    assert found(family, *other, device=device) is None


@pytest.mark.parametrize("path", ["dequantized", "uncompared"])
def test_but_not_by_what_depends_on_rows_or_was_not_compared(path):
    key = (64, 64, mx.bfloat16, FMT, True)
    keep("qmm", (512, *key), path=path)
    assert found("qmm", 512, *key).path == path and found("qmm", 128, *key) is None


def test_steps_go_to_stock_where_that_was_faster():
    given = mx.bfloat16, 4, (1, 2, 4000, 64), 64
    assert why_not(*given) is None
    keep("attention_step", STEP)
    assert why_not(*given) is None
    keep("attention_step", STEP, path="stock")
    assert why_not(*given) == f"measured here: {TIMES}"
    with use_backend("cuda"):
        assert why_not(*given) is None


def test_untuned_and_back():
    before, _ = backends.epoch.number, keep(config=OTHER)
    outside = backends.epoch.number
    with untuned():
        assert configure("qmv", "cuda", *KEY) == heuristic()
        assert backends.epoch.number not in (before, outside)
    assert configure("qmv", "cuda", *KEY) == OTHER
    assert len({before, outside, backends.epoch.number}) == 3


def test_a_mode_is_that_of_its_thread():
    keep(config=OTHER)
    seen = []
    with untuned(), collected_records() as asked:
        thread = threading.Thread(target=lambda: seen.append(configure("qmv", "cuda", *KEY)))
        thread.start()
        thread.join()
        assert seen == [OTHER] and configure("qmv", "cuda", *KEY) == heuristic()
        assert list(asked) == [RECORDS["qmv"](*KEY)]


def test_threads_that_ask_while_results_change_get_one_of_them():
    wrong, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            if (config := configure("qmv", "cuda", *KEY)) not in (OTHER, heuristic()):
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
    found("qmv", *KEY)
    with collected_records() as asked:
        for _ in range(2):
            configure("qmv", "cuda", *KEY)
            found("qmv", *KEY)
    assert list(asked) == [RECORDS["qmv"](*KEY)]
    configure("qmv", "cuda", 2, *KEY[1:])
    assert len(asked) == 1
