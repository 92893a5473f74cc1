"""The command tune: the shapes of a real model, its table, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from mlx_qlayers import convert_model
from mlx_qlayers.cli import main
from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.tuning import several, store
from mlx_qlayers.tuning.shapes import problems_of_model

M1 = "applegpu_g13s"
ARGUMENTS = ["tune", "--machine", M1, "--beam", "1", "--prompt-tokens", "20"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path)
    store.forget()
    yield tmp_path / "tuning"
    store.forget()


def test_the_shapes_are_those_that_the_model_has():
    loaded = load_stock(str(shipped_model()))
    convert_model(loaded.model, config=loaded.quantization)
    keys = [target.key for target in problems_of_model(loaded.model, prompt=20)]
    form = "bfloat16 affine-64-4-t"
    # q with k and v, o, gate and up together, down, the head.
    shapes = {"640x384": "-norm-3", "384x384": "-residual", "2048x384": "-norm-gate"}
    shapes |= {"384x1024": "-residual", "4096x384": ""}
    few = "qmv 1x"
    decoding = [f"{few}{shape} {form}{kind}" for shape, kind in shapes.items()]
    decoding.insert(1, "attention_decode 2x3x32x64x64 bfloat16 bits-0")
    assert keys[: len(decoding)] == decoding and len(set(keys)) == len(keys)
    # Twenty rows fall into the bucket of 32; o is not fused with anything.
    assert f"qmm 32x384x384 {form}" in keys


def test_it_prints_a_table_and_stores_and_lists_and_clears(capsys, monkeypatch):
    # As when the budget ends early.
    tune_all = several.tune_all
    monkeypatch.setattr(several, "tune_all", lambda *a, **o: islice(tune_all(*a, **o), 2))
    assert main([*ARGUMENTS, "--budget", "2"]) == 0
    out, err = capsys.readouterr()
    header, first, *_ = out.splitlines()
    assert header.split()[:6] == ["kernel", "shape", "heuristic", "found", "gain", "tried"]
    assert first.split()[0] == "qmv" and "1x640x384" in first
    assert "were not tuned" in err
    assert main(["tune", "--list"]) == 0
    assert "qmv 1x640x384" in capsys.readouterr().out
    kept = len(store.listed()[M1])
    assert main(["tune", "--clear"]) == 0 and not store.listed()
    assert capsys.readouterr().out == f"{kept} results deleted\n"
    assert main(["tune", "--list"]) == 0
    assert "nothing was tuned" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_found(monkeypatch, capsys, folder):
    def interrupted(*args, progress, **options):
        def count(trial):
            trials.append(trial)
            progress(trial)
            if len(trials) == 6:
                raise KeyboardInterrupt

        return tune(*args, progress=count, **options)

    trials, tune = [], several.tune
    monkeypatch.setattr(several, "tune", interrupted)
    monkeypatch.setattr(several, "processes", lambda machine: 1)
    assert main([*ARGUMENTS, "--budget", "600"]) == 0
    assert "interrupted" in capsys.readouterr().err
    assert len(json.loads((folder / f"{M1}.json").read_text())["entries"]) >= 1


@pytest.mark.slow
def test_two_commands_at_once_and_one_that_is_killed(tmp_path):
    command = [sys.executable, "-m", "mlx_qlayers", *ARGUMENTS, "--budget", "8"]
    environment = os.environ | {"MLX_QLAYERS_CACHE_DIR": str(tmp_path)}
    others = [command, [*command, "--batch", "2"], [*command, "--batch", "3"]]
    processes = [subprocess.Popen(c, env=environment, stdout=subprocess.DEVNULL) for c in others]
    path = Path(tmp_path, "tuning", f"{M1}.json")
    end = time.monotonic() + 120
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.2)
    processes[2].send_signal(signal.SIGKILL)
    assert [process.wait() for process in processes] == [0, 0, -signal.SIGKILL]
    keys = json.loads(path.read_text())["entries"]
    assert any(" 1x" in key for key in keys) and any(" 2x" in key for key in keys)
