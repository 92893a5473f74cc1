"""The measurements that come with the package are of a kind that operations can use."""

import json
import re
import shutil
from dataclasses import fields

import mlx.core as mx
import pytest

from mlx_qlayers import explain
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements import entries
from mlx_qlayers.measurements.entries import Entry, look_up
from mlx_qlayers.metal.records import RECORDS
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.runtime.devices import device_of
from mlx_qlayers.runtime.devices.record import Device, limits
from tests.machine import has_gpu, ships

FILES = sorted(entries.SHIPPED.glob("*.json"))


def problem_of(key):
    """The problem that a result was stored for."""
    name, shape, dtype, *form = key.split(" ")
    sizes, dtype = [*map(int, shape.split("x"))], getattr(mx, dtype)
    if name == "attention_step":
        return RECORDS[name](dtype, *sizes)
    mode, group, bits, order, *kind = form[0].split("-")
    rest = ["-".join(kind)] if name in ("qmv", "qmm_skinny") else [order == "t"]
    return RECORDS[name](*sizes, dtype, Format(int(group), int(bits), mode), *rest)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_entry_is_understood_and_says_where_it_comes_from(path):
    explain(reset=True)
    found, raw = entries.read(path.parent, path.stem), entries.load(path, path.stem)
    assert len(found) == len(raw["entries"]) and not explain()
    assert found or raw["limits"]
    Device("", **raw.get("limits", {}))
    for key, value in raw["entries"].items():
        assert set(value) <= {field.name for field in fields(Entry)}, key
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", found[key].date), key
        assert found[key].mlx, key
        assert found[key].config is not None or found[key].note, key
        without = "a guess", "no command was kept"
        told = found[key].note
        assert found[key].command or any(each in told for each in without), key


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tuned_results_are_legal_configurations_of_kernels_as_they_are(path):
    """One that fails here belongs to a kernel that was changed: tune it anew, or delete it."""
    for key, entry in entries.read(path.parent, path.stem).items():
        if entry.config is not None:
            problem = problem_of(key)
            assert problem.key == key
            (kind,) = (
                k for k in problem.configs if {f.name for f in fields(k)} == set(entry.config)
            )
            problem.check(kind(**entry.config))
            if entry.path == "uncompared" and not entry.source:
                continue
            assert entry.source == problem.source
            assert entry.seconds == entry.paths[entry.path]


@pytest.mark.parametrize("kind, file", [("cuda", "sm_999"), ("metal", "applegpu_g99")])
def test_a_file_is_all_that_a_new_device_takes(kind, file, monkeypatch, tmp_path):
    folder = shutil.copytree(entries.SHIPPED, tmp_path / "data")
    content = json.loads((folder / "sm_90.json").read_text())["entries"]["attention_step_splits"]
    content["values"]["most"] = 12345
    found = {"limits": {"cores": 77}, "entries": {"attention_step_splits": content}}
    (folder / f"{file}.json").write_text(json.dumps({"device": file} | found))
    has_gpu(monkeypatch, file)
    ships(monkeypatch, folder)
    assert device_of(kind).cores == 77 and device_of(kind).name == file
    entry, evidence = look_up("attention_step_splits", file, *device_of(kind).others)
    assert entry.values["most"] == 12345 and evidence.device == file
    assert look_up("attention_layout", file, *device_of(kind).others)[1].device != file
    limits.cache_clear()
    advance_epoch()


def test_rules_go_by_values_that_are_stored_and_no_others_are():
    text = "".join(path.read_text() for path in entries.SHIPPED.parents[1].rglob("*.py"))
    named, asked = (
        {*re.findall(pattern, text)}
        for pattern in (r'"([a-z]\w+_\w+)"', r'(?:threshold|tabled|gain)\(\s*"(\w+)"')
    )
    named |= {f"{name}_gain" for name in re.findall(r'choose\(\s*"(\w+)"', text)}
    found = (entries.read(path.parent, path.stem) for path in FILES)
    stored = {key for each in found for key, entry in each.items() if entry.values is not None}
    assert asked <= stored <= named
