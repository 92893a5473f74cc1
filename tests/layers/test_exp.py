"""The exponential as a layer calls its operation, and has no parameters."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numerics import assert_function

from mlx_qlayers import explain
from mlx_qlayers.layers.exp import Exp


def test_a_layer_calls_its_operation():
    x = mx.random.normal((2, 3))
    explain(reset=True)
    layer = Exp()
    y = layer(x)
    assert y.dtype == x.dtype
    assert_function(y, np.exp, x)
    assert [d.op for d in explain() if not d.op.startswith("kernel ")] == ["exp"]
    assert layer.parameters() == {}
