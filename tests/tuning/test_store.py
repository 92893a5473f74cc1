"""Stored results: found again, and never trusted without reason."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import timeit
from dataclasses import asdict, replace
from importlib.metadata import version

import mlx.core as mx
import pytest

from mlx_qlayers import explain
from mlx_qlayers.metal.common.row_sum import KERNEL, RowSum
from mlx_qlayers.tuning import store
from mlx_qlayers.tuning.store import Entry, clear, key_of, listed, save, source_hash, stored

KEY = key_of("row_sum", (64, 1024), mx.float16)
BEST = ("kernel", RowSum(upcast=2))
ENTRY = Entry(asdict(RowSum(upcast=2)), "kernel", 1e-5, 2e-5, 10, "", version("mlx"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    store.forget()
    explain(reset=True)
    yield tmp_path / "tuning"
    store._unsaved.clear()
    store.forget()


def entry(**changes) -> Entry:
    return replace(ENTRY, source=source_hash(KERNEL), **changes)


def found(device="gpu"):
    store.forget()
    return stored(KEY, (RowSum,), (KERNEL,), device)


def test_what_was_saved_is_found_in_its_own_types(folder):
    assert found() is None
    assert save("gpu", {KEY: entry()})
    path, config = found()
    assert (path, config) == BEST and config.padded is True
    assert found("other") is None
    assert listed() == {"gpu": {KEY: entry()}}


def test_a_second_look_takes_less_than_two_microseconds(folder):
    save("gpu", {KEY: entry()})
    found()
    times = timeit.repeat(lambda: stored(KEY, (RowSum,), (KERNEL,), "gpu"), number=1000, repeat=10)
    assert min(times) / 1000 < 2e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"mlx": "0.1.0"},
        {"config": {"upcast": 2}},
        {"config": asdict(RowSum()) | {"another": 1}},
    ],
)
def test_a_stale_or_foreign_entry_is_ignored_with_a_note(folder, changes):
    save("gpu", {KEY: entry(**changes)})
    assert found() is None
    assert any(d.op == "tuning" and d.path == "ignored" for d in explain())


def test_an_entry_of_another_version_of_the_kernel_is_ignored(folder):
    save("gpu", {KEY: replace(entry(), source="0123456789abcdef")})
    assert found() is None


def test_a_faster_path_is_told_while_it_is_current(folder):
    save("gpu", {KEY: entry(path="stock")})
    assert found() == ("stock", RowSum(upcast=2))
    save("gpu", {KEY: entry(path="stock", mlx="0.1.0")})
    assert found() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"device": "gpu"}',
        '{"device": "other", "entries": {}}',
        '{"device": "gpu", "entries": {"a": 3}}',
        '{"device": "gpu", "entries": {"a": {"config": {}}}}',
        "\x00\x01\x02",
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_then_replaced(folder, text):
    folder.mkdir(parents=True)
    (folder / "gpu.json").write_text(text)
    assert found() is None
    assert any(d.op == "tuning" for d in explain())
    assert save("gpu", {KEY: entry()}) and found() == BEST


@pytest.mark.parametrize("field", ["config", "path", "seconds", "tried", "source"])
def test_a_field_of_the_wrong_type_is_ignored(folder, field):
    save("gpu", {KEY: entry()})
    content = json.loads((folder / "gpu.json").read_text())
    content["entries"][KEY][field] = [None]
    (folder / "gpu.json").write_text(json.dumps(content))
    assert found() is None


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


def test_a_kill_in_the_middle_leaves_a_whole_file(folder, tmp_path):
    program = (
        "from mlx_qlayers.tuning.store import Entry, save\n"
        f"entry = {ENTRY!r}\n"
        "print('ready', flush=True)\n"
        "i = 0\n"
        "while True:\n"
        "    i += 1\n"
        "    save('gpu', {f'row_sum {i % 50}x1 float32': entry})\n"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        json.loads((folder / "gpu.json").read_text())
    assert save("gpu", {KEY: entry()}) and found() == BEST


def test_a_folder_that_cannot_be_written_keeps_results_for_the_process(
    tmp_path, monkeypatch, capsys
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(blocked))
    assert not save("gpu", {KEY: entry()})
    assert found() == BEST
    assert "not kept" in capsys.readouterr().err


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
