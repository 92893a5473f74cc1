"""Checkpoints quantized on disk: the same as mlx-lm's, and never half written."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.convert import convert as stock_convert

from mlx_qlayers.conversion.quantize import quantize_checkpoint

MODES = [("affine", 64, 4), ("affine", 32, 3), ("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)]


@pytest.mark.parametrize(("mode", "group_size", "bits"), MODES)
def test_writes_what_mlx_lm_writes(mode, group_size, bits, plain_model, tmp_path):
    written = quantize_checkpoint(
        plain_model, tmp_path / "ours", group_size=group_size, bits=bits, mode=mode
    )
    with contextlib.redirect_stdout(None):
        stock_convert(
            str(plain_model), str(tmp_path / "theirs"), True, group_size, bits, q_mode=mode
        )
    ours, theirs = (mx.load(str(tmp_path / n / "model.safetensors")) for n in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        assert bytes(memoryview(array.view(mx.uint8))) == bytes(
            memoryview(theirs[name].view(mx.uint8))
        ), name
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("ours", "theirs")]
    assert configs[0] == configs[1]
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert written.layers == 15
    assert written.nbytes == sum(array.nbytes for array in ours.values())


def test_generates_with_mlx_lm(plain_model, tmp_path):
    quantize_checkpoint(plain_model, tmp_path / "out", bits=8, dtype="float32")
    model, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    stock, _ = mlx_lm.load(str(plain_model))
    stock.set_dtype(mx.float32)
    tokens = mx.array([tokenizer.encode("Once upon a time")])
    logits, wanted = (np.array(m(tokens).astype(mx.float32)) for m in (model, stock))
    assert np.abs(logits - wanted).max() < 0.05 * np.abs(wanted).max()


def test_a_quantization_of_null_is_none(plain_model, tmp_path):
    source = shutil.copytree(plain_model, tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"quantization": None}
    (source / "config.json").write_text(json.dumps(config))
    assert quantize_checkpoint(source, tmp_path / "out").layers == 15
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert written == {"group_size": 64, "bits": 4, "mode": "affine"}


# Processes that kill themselves at an event among those that touch the target's directory: one at
# none, then in the middle and at the last two. All are forks of one that has imported everything.
KILLED = """
import json, os, signal, sys
from mlx_qlayers.conversion.quantize import quantize_checkpoint
import mlx_lm
EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.listdir", "shutil.rmtree"}
def ended(name, last=0):
    folder, (out, into) = os.path.join(sys.argv[2], name), os.pipe()
    os.mkdir(folder)
    if not (child := os.fork()):
        seen = 0
        def hook(event, args):
            nonlocal seen
            if event in EVENTS and folder in str(args[0]):
                seen += 1
                if seen == last:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        quantize_checkpoint(sys.argv[1], os.path.join(folder, "out"))
        os.write(into, str(seen).encode())
        os._exit(0)
    os.close(into)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.read(out, 99).decode()
code, events = ended("whole")
last = int(events)
print(json.dumps([code, *(ended(str(n), n)[0] for n in (last // 2, last - 1, last))]))
"""


@pytest.mark.slow
def test_whole_or_absent_when_killed(plain_model, tmp_path):
    command = [sys.executable, "-c", KILLED, str(plain_model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, *[-signal.SIGKILL] * 3], done.stderr
    files = sorted(os.listdir(tmp_path / "whole" / "out"))
    outcomes = []
    for folder in sorted(tmp_path.glob("[0-9]*"), key=lambda path: int(path.name)):
        outcomes.append((folder / "out").exists())
        if outcomes[-1]:
            assert sorted(os.listdir(folder / "out")) == files
            mlx_lm.load(str(folder / "out"))
        else:
            assert any(folder.iterdir())
            quantize_checkpoint(plain_model, folder / "out")
        assert os.listdir(folder) == ["out"]
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}
