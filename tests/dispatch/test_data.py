"""The measurements that come with the package are of a kind that operations can use."""

import re
from dataclasses import fields

import mlx.core as mx
import pytest

from mlx_qlayers import explain
from mlx_qlayers.formats import Format
from mlx_qlayers.measurements import entries
from mlx_qlayers.measurements.entries import Entry
from mlx_qlayers.metal.records import RECORDS

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
    assert len(found) == len(raw["entries"]) > 1 and not explain()
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
