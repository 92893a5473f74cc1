"""The command tune: the shapes of a real model, its table, and what it leaves behind."""

import json
import os

import mlx.core as mx
import pytest
from machine import own_cache
from step_models import on_a_gpu

from mlx_qlayers import convert_model
from mlx_qlayers.cli import main
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.dispatch.measurements import found
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements import store
from mlx_qlayers.measurements.entries import device_name
from mlx_qlayers.metal.records import RECORDS
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.tuning.model_records import records_of, records_of_model

ARGUMENTS = ["tune", "--beam", "1", "--prompt-tokens", "20"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    own_cache(tmp_path, monkeypatch)
    advance_epoch()
    yield tmp_path / "tuning"
    monkeypatch.undo()
    advance_epoch()


def test_the_shapes_are_those_that_the_model_has(machine):
    machine.apple()
    machine.giving_zeros("metal")
    loaded = load_stock(str(shipped_model()))
    convert_model(loaded.model, config=loaded.quantization, verify=False, calibrate=False)
    with on_a_gpu():
        keys = [record.key for record in records_of_model(loaded.model, prompt=20)]
    # q with k and v, o, gate and up together, down, the head.
    shapes = {"640x384": "-norm-3", "384x384": "-residual", "2048x384": "-norm-gate"}
    shapes |= {"384x1024": "-residual", "4096x384": "-norm"}
    form = "bfloat16 affine-64-4-t"
    products = [key for key in keys if key.startswith("qmv")]
    assert products == [f"qmv 1x{shape} {form}{kind}" for shape, kind in shapes.items()]
    # A step of decoding takes all rows of a cache's buffer.
    assert "attention_step 1x6x2x256x64x64 bfloat16" in keys and len(set(keys)) == len(keys)


def test_steps_of_decoding_are_tuned_with_long_caches_too(machine):
    machine("metal")

    class Model:
        def make_cache(self):
            return []

        def __call__(self, tokens, cache):
            found("attention_step", mx.bfloat16, 1, 28, 4, 1024, 128, 128)

    keys = [record.key for record in records_of_model(Model(), prompt=0)]
    sizes = 1024, 8192, 32768, 65536
    assert keys == [f"attention_step 1x28x4x{size}x128x128 bfloat16" for size in sizes]


def test_problems_that_share_results_count_once_and_others_not_at_all(machine):
    rest = 384, 384, mx.bfloat16, Format(64, 4), True
    asked = [("qmm", (rows, *rest)) for rows in (20, 32, 33)]
    decode = "attention_decode", (mx.bfloat16, 3, 64, 64, 0, 2, 20)
    for backend, keys in (("metal", ["32x384x384", "64x384x384", "2x3x32x64x64"]), ("host", [])):
        machine(backend)
        every = [RECORDS[name](*arguments) for name, arguments in (*asked, decode)]
        found = [record.key.split()[1] for record in records_of(every)]
        # A CPU configures decoding by options of its own.
        assert found == (keys or ["32x384x384", "64x384x384"])


def test_it_prints_a_table_and_stores_and_lists_and_clears(capsys):
    assert main([*ARGUMENTS, "--budget", "1"]) == 0
    out, err = capsys.readouterr()
    header, first, *_ = out.splitlines()
    assert header.split()[:6] == ["kernel", "shape", "heuristic", "found", "gain", "tried"]
    assert first.split()[0] == "qmv" and "1x640x384" in first
    assert "were not tuned" in err
    assert main(["tune", "--list"]) == 0
    assert "qmv 1x640x384" in capsys.readouterr().out
    kept = len(store.listed()[device_name()])
    assert main(["tune", "--clear"]) == 0 and not store.listed()
    assert capsys.readouterr().out == f"{kept} results deleted\n"
    assert main(["tune", "--list"]) == 0
    assert "nothing was tuned" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_found(monkeypatch, capsys, folder):
    shown = []

    def interrupt(self, text):
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("tqdm.tqdm.set_postfix_str", interrupt)
    assert main([*ARGUMENTS, "--budget", "600"]) == 0
    assert "interrupted" in capsys.readouterr().err
    (entry,) = json.loads((folder / f"{device_name()}.json").read_text())["entries"].values()
    assert entry["tried"] == 3 and entry["path"] == "uncompared"


def test_a_device_that_is_lost_ends_the_process_with_what_was_found(monkeypatch, capsys):
    """From the second configuration on it refuses all work."""

    def refused(*arrays):
        raise RuntimeError("[METAL] Command buffer execution failed")

    def lose(self, text):
        monkeypatch.setattr(mx, "eval", refused)

    ended = []
    monkeypatch.setattr("tqdm.tqdm.set_postfix_str", lose)
    monkeypatch.setattr(os, "_exit", ended.append)
    main([*ARGUMENTS, "--budget", "60"])
    assert ended == [1] and "the device runs nothing any more" in capsys.readouterr().err
    assert store.listed()
