"""The results that come with the package are of a kind that launchers can use."""

from dataclasses import fields

import mlx.core as mx
import pytest

from mlx_qlayers.tuning import store
from mlx_qlayers.tuning.families import FAMILIES
from mlx_qlayers.tuning.family import Problem
from mlx_qlayers.tuning.machines import MACHINES

FILES = sorted(store._SHIPPED.glob("*.json"))


def test_every_apple_gpu_that_the_model_knows_has_some():
    apple = {name for name in MACHINES if name.startswith("applegpu")}
    assert apple <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_they_are_legal_configurations_of_families_that_there_are(path):
    found = store._read(path, path.stem)
    assert found
    for key, entry in found.items():
        name, shape, dtype, *form = key.split(" ")
        family = FAMILIES[name]
        problem = Problem(tuple(map(int, shape.split("x"))), getattr(mx, dtype), "".join(form))
        kinds = [k for k in family.configs if {f.name for f in fields(k)} == set(entry.config)]
        assert family.why_not(kinds[0](**entry.config), problem) is None
        assert entry.seconds <= entry.heuristic
        assert (entry.path == "modelled") == path.stem.startswith("applegpu")
