"""What a snapshot of modules sees."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_qlayers import QLinear
from mlx_qlayers.decode.snapshot import Snapshot

CHANGES = {
    "an array": lambda m: setattr(m.layers[1], "weight", m.layers[1].weight + 0),
    "a number": lambda m: setattr(m.layers[1], "eps", 0.5),
    "a module": lambda m: setattr(m, "layers", [QLinear(64, 64), m.layers[1]]),
    "a class": lambda m: setattr(m.layers[0], "__class__", nn.QuantizedLinear),
    "another array": lambda m: setattr(m.layers[1], "more", mx.zeros(2)),
    "one array less": lambda m: m.layers[0].pop("bias"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_sees(change):
    model, more = nn.Sequential(QLinear(64, 64), nn.RMSNorm(64)), {"key": 1}
    snapshot = Snapshot(model.modules(), more)
    assert snapshot.holds()
    CHANGES[change](model)
    assert not snapshot.holds()


def test_a_snapshot_sees_other_dictionaries():
    more = {"key": 1}
    snapshot = Snapshot([], more)
    more["key"] = 2
    assert not snapshot.holds()
