"""Thresholds and gains are those of a device, else of its backend."""

import json

import pytest

from mlx_qlayers.measurements.entries import devices, look_up
from mlx_qlayers.measurements.thresholds import gain, threshold
from mlx_qlayers.runtime.backend import advance_epoch

pytestmark = pytest.mark.usefixtures("some_gpu")


def test_thresholds_and_gains_come_from_data():
    assert threshold("qmm_max_rows", "split", device="cuda") == 64
    assert threshold("qmm_max_rows") == {"whole": 128, "split": 64}
    # Nothing was measured on an Apple GPU.
    assert threshold("qmm_max_rows", "split", device="metal") is None
    assert threshold("no such entry") is threshold("qmm_max_rows", "no such value") is None
    assert [gain("qmv_gain", rows, "affine", 4) for rows in (1, 3, 16, 99)] == [
        4.4,
        7.2,
        10.5,
        10.5,
    ]
    plain = [gain("gather_qmm_gain", rows, "affine", 8, "plain") for rows in (1, 64, 511, 512)]
    assert plain == [0.7, 1.1, 1.1, 2.6]
    assert gain("qmv_gain", 1, "affine", 7) is None


def test_other_cuda_devices_go_by_the_thresholds_of_an_h200_and_say_so():
    """This one is called some_gpu."""
    evidence = look_up("qmm_max_rows", *devices("cuda"))[1]
    assert (evidence.source, evidence.device) == ("shipped result", "sm_90") and evidence.date
    assert "bench_quantized_matmul.py" in evidence.command


def test_apple_gpus_go_by_guesses(machine):
    machine.apple("applegpu_g13g")
    entry, evidence = look_up("attention_step_splits", *devices("metal"))
    assert entry.values.keys() == threshold("attention_step_splits", device="cuda").keys()
    assert evidence.device == "metal"


def test_values_measured_here_come_first_if_they_are_like_the_packages(tmp_path):
    folder = tmp_path / "tuning"
    folder.mkdir()

    def write(**values):
        content = {name: {"values": value} for name, value in values.items()}
        (folder / "cpu.json").write_text(json.dumps({"device": "cpu", "entries": content}))
        advance_epoch()

    write(qvm_gain=3, grid_sample_gain={"nearest": 2.0})
    assert threshold("qvm_gain", device="host") == 3
    assert look_up("qvm_gain", *devices("host"))[1].source == "measured here"
    assert threshold("grid_sample_gain", "bilinear", device="host") == 1.8
    write(qvm_gain="fast")
    assert threshold("qvm_gain", device="host") == 1.4
