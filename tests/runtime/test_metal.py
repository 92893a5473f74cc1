"""The metal backend hands MLX what it needs, through whatever mx.fast.metal_kernel is now."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_qlayers.runtime.backend import BackendError, use_backend

from .kernels import HISTOGRAM

X = mx.zeros(16, mx.uint8)
CALL = {"grid": (16, 1, 1), "threadgroup": (16, 1, 1), "output_shapes": [(16,)]}


def test_the_creation_has_what_the_call_must_not_have(metal):
    HISTOGRAM([X], init_value=0, **CALL)
    program = HISTOGRAM.program
    assert metal.made == [
        {
            "name": "histogram",
            "input_names": ("x",),
            "output_names": ("counts",),
            "source": program.source,
            "header": program.header,
            "ensure_row_contiguous": True,
            "atomic_outputs": True,
        }
    ]
    assert set(metal.called[0]) == {
        "inputs",
        "template",
        "grid",
        "threadgroup",
        "output_shapes",
        "output_dtypes",
        "init_value",
    }


def test_the_function_is_looked_up_at_every_call(metal, monkeypatch):
    HISTOGRAM([X], **CALL)
    second = type(metal)()
    monkeypatch.setattr(mx.fast, "metal_kernel", second)
    HISTOGRAM([X], **CALL)
    assert (len(metal.called), len(second.made), len(second.called)) == (1, 1, 1)


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal_it_cannot_be_forced():
    with pytest.raises(BackendError, match=r"metal .* mx.metal.is_available\(\) is false"):
        use_backend("metal")
