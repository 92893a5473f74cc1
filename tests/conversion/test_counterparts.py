"""Which layer stands in for which."""

from __future__ import annotations

import subprocess
import sys

import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_qlayers import QLinear
from mlx_qlayers.conversion.counterparts import counterpart_of, stock_of
from mlx_qlayers.layers.qlinear import QEmbedding
from mlx_qlayers.layers.switch_linear import QSwitchLinear

PAIRS = {
    nn.QuantizedLinear: QLinear,
    nn.QuantizedEmbedding: QEmbedding,
    QuantizedSwitchLinear: QSwitchLinear,
}


@pytest.mark.parametrize("stock", PAIRS)
def test_there_and_back(stock):
    sizes = (64, 32, 4) if stock is QuantizedSwitchLinear else (64, 64)
    assert counterpart_of(stock) is PAIRS[stock]
    assert stock_of(PAIRS[stock](*sizes)) is stock and stock_of(stock(*sizes)) is None


def test_other_classes_have_none():
    class Special(nn.QuantizedLinear):
        pass

    assert counterpart_of(Special) is None and counterpart_of(nn.Linear) is None
    assert stock_of(type("Own", (QLinear,), {})(64, 64)) is None


def test_asking_does_not_import_mlx_lm():
    script = (
        "import sys, mlx.nn as nn; from mlx_qlayers.conversion.counterparts import counterpart_of;"
        "counterpart_of(nn.QuantizedLinear); sys.exit('mlx_lm.models.switch_layers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
