"""Stored results: found again, and never trusted without reason."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from row_sum import RowSum, RowSumRecord

from mlx_qlayers import explain, quantized_matmul, use_backend
from mlx_qlayers.dispatch.measurements import lookup
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements import entries
from mlx_qlayers.measurements.entries import Entry
from mlx_qlayers.measurements.store import clear, listed, save
from mlx_qlayers.metal.quantized_matmul.records import QmvRecord
from mlx_qlayers.runtime.backend import advance_epoch
from tests.machine import no_home

RECORD = RowSumRecord(64, 1024, mx.float16)
KEY = RECORD.key
BEST = ("kernel", RowSum(upcast=2))
ENTRY = Entry(asdict(RowSum(upcast=2)), "kernel", 1e-5, 2e-5, 10, "", version("mlx"))


def entry(**changes) -> Entry:
    return replace(ENTRY, source=RECORD.source, **changes)


def found(device="gpu"):
    advance_epoch()
    best = lookup(RECORD, device)
    return best and best[:2]


def test_what_was_saved_is_found_in_its_own_types(folder):
    assert found() is None
    assert save("gpu", {KEY: entry()})
    path, config = found()
    assert (path, config) == BEST and config.padded is True
    assert found("other") is None
    assert listed() == {"gpu": {KEY: entry()}}


DAMAGED = [
    "", "{", "[]", "[" * 100_000, '{"device": "gpu"}', '{"device": "gpu", "entries": []}',
    '{"device": "other", "entries": {}}', "\x00\x01\x02",
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_foreign_file_is_ignored_and_then_set_aside(folder, text):
    folder.mkdir(parents=True)
    (folder / "gpu.json").write_text(text)
    assert found() is None
    assert any(d.op == "tuning" for d in explain())
    for number in (1, 2):  # nothing that was set aside before is lost
        (folder / "gpu.json").write_text(text)
        assert save("gpu", {KEY: entry()}) and found() == BEST
        assert (folder / f"gpu.damaged-{number}").read_text() == text
    assert listed() == {"gpu": {KEY: entry()}}


ODD = {
    "null": None,
    "a list": [1, 2],
    "a number": 1.5,
    "text": "kernel",
    "an empty mapping": {},
    "another config": asdict(ENTRY) | {"config": {"upcast": 2.5}},
    "a list as config": asdict(ENTRY) | {"config": [2]},
    "no seconds": asdict(ENTRY) | {"seconds": None},
    "infinite seconds": asdict(ENTRY) | {"seconds": float("inf")},
    "seconds of no path": asdict(ENTRY) | {"paths": {"kernel": "fast"}},
    "true tries": asdict(ENTRY) | {"tried": True},
    "values of no kind": {"values": {"a": {"b": 1}}},
    "values that the package lacks": {"values": 3},
}


def test_odd_entries_cost_the_others_nothing_and_are_kept(folder):
    """Of any version of this package, or of a user's hand."""
    save("gpu", {KEY: entry()})
    path = folder / "gpu.json"
    content = json.loads(path.read_text())
    content["written by"] = {"another": "version"}
    content["entries"] |= ODD
    content["entries"][KEY]["new field"] = [1, 2]
    path.write_text(json.dumps(content))
    assert found() == BEST
    notes = " ".join(d.reason for d in explain() if d.path == "ignored")
    assert all(f"gpu.json: {name}: " in notes for name in [*ODD][:-1])
    assert f"{[*ODD][-1]} has other values" in notes
    assert set(listed()["gpu"]) == {KEY}
    assert save("gpu", {"row_sum 1x1 float32": entry()}) and found() == BEST
    after = json.loads(path.read_text())
    assert after["written by"] == content["written by"]
    assert json.dumps([after["entries"][key] for key in content["entries"]]) == json.dumps(
        [*content["entries"].values()]
    )
    assert set(listed()["gpu"]) == {KEY, "row_sum 1x1 float32"}


def unreadable(folder, monkeypatch):
    def fails(self, *arguments, **options):
        raise OSError(5, "Input/output error")

    (folder / "gpu.json").touch()
    monkeypatch.setattr(Path, "read_text", fails)


OBSTACLES = {
    "a pipe": lambda folder, _: os.mkfifo(folder / "gpu.json"),
    "a folder": lambda folder, _: os.mkdir(folder / "gpu.json"),
    "a file in place of the folder": lambda folder, _: (folder.rmdir(), folder.touch()),
    "no home folder": no_home,
    "a file that cannot be read": unreadable,
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_cannot_be_kept_holds_for_the_process(obstacle, folder, monkeypatch, capsys):
    """And what cannot be read is not written over."""
    folder.mkdir(parents=True)
    OBSTACLES[obstacle](folder, monkeypatch)
    assert found() is None and not any(listed().values())
    assert not save("gpu", {KEY: entry()}) and found() == BEST
    assert not save("gpu", {KEY: entry()})
    assert capsys.readouterr().err.count("not kept") == 1
    assert obstacle != "no home folder" or clear() == 0


def _add(cache, number):
    os.environ["MLX_QLAYERS_CACHE_DIR"] = str(cache)
    for i in range(10):
        save("gpu", {f"row_sum {number}x{i} float32": ENTRY})


def test_two_processes_lose_nothing(folder, tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add, args=(tmp_path, n)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(listed()["gpu"]) == 20
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_what_a_killed_save_leaves_is_removed_by_the_next(folder):
    """And what was saved before is there."""
    program = (
        "import os, signal\n"
        "from mlx_qlayers.measurements.entries import Entry\n"
        "from mlx_qlayers.measurements.store import save\n"
        "os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"save('gpu', {{'row_sum 1x1 float32': {ENTRY!r}}})\n"
    )
    save("gpu", {KEY: entry()})
    for end in (lambda: True, lambda: save("gpu", {KEY: entry()}), lambda: clear("gpu") == 1):
        assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
        # The second removed what the first had left.
        assert len([*folder.glob(".*")]) == 1
        assert found() == BEST and end()
    assert [*folder.glob(".*")] == []


def test_a_full_disk_leaves_the_old_file_and_no_litter(folder, monkeypatch):
    save("gpu", {KEY: entry()})
    before = (folder / "gpu.json").read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not save("gpu", {KEY: entry(seconds=1.0)})
    monkeypatch.undo()
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(folder.parent))
    assert (folder / "gpu.json").read_text() == before
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_clear_deletes_and_says_how_many(folder):
    save("gpu", {KEY: entry()})
    save("other", {KEY: entry(), "row_sum 1x1 float32": entry()})
    assert clear("gpu") == 1 and found() is None
    assert clear() == 2 and listed() == {}


@pytest.mark.parametrize("change", [{"outputs": 0}, {"local": 10**9}, {"outputs": "x"}], ids=str)
def test_a_configuration_that_no_kernel_takes_is_left_alone(change):
    """As somebody wrote it into the file: the operation goes on by its heuristic."""
    problem = QmvRecord(3, 40, 128, mx.float16, Format(64, 4))
    config = asdict(problem.heuristic("host")) | change
    kernels = problem.source
    assert save("cpu", {problem.key: replace(ENTRY, config=config, source=kernels)})
    x, packed = mx.ones((3, 128), mx.float16), mx.quantize(mx.ones((40, 128), mx.float16))
    with use_backend("host"):
        y = quantized_matmul(x, *packed)
    assert y.tolist() == [[128.0] * 40] * 3
    assert any(d.path == "ignored" and problem.key in d.reason for d in explain())


@pytest.mark.parametrize(
    ("kind", "facts", "name"),
    [
        ("metal", {"architecture": "applegpu_g16s", "device_name": "Apple M4 Pro"}, "Apple_M4_Pro"),
        ("metal", {"architecture": "applegpu_g16s", "device_name": "Apple M4 Max"}, "Apple_M4_Max"),
        ("cuda", {"architecture": "sm_90", "device_name": "NVIDIA H200"}, "sm_90"),
        ("metal", {}, "gpu"),
        (None, {}, "cpu"),
    ],
)
def test_results_belong_to_a_gpu_whatever_the_default_device_is(kind, facts, name, machine):
    """Pros and Maxes have one architecture, and not one speed."""
    machine.gpu(kind, facts)
    assert entries.device_name() == name
