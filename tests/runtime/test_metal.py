"""The metal backend hands MLX what it needs, through whatever mx.fast.metal_kernel is now."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmm import qmm_config
from mlx_qlayers.runtime import host
from mlx_qlayers.runtime.backend import BackendError, use_backend
from mlx_qlayers.runtime.launch import Launch
from mlx_qlayers.runtime.program import Program
from tests.launchers import qmm
from tests.machine import has_gpu
from tests.numerics import random
from tests.packed import check_product, random_packed

from .kernels import HISTOGRAM

X = mx.zeros(16, mx.uint8)
CALL = {"grid": (16, 1, 1), "threadgroup": (16, 1, 1), "output_shapes": [(16,)]}


def test_the_function_is_looked_up_at_every_call(metal, monkeypatch):
    HISTOGRAM([X], **CALL)
    second = type(metal)()
    monkeypatch.setattr(mx.fast, "metal_kernel", second)
    HISTOGRAM([X], **CALL)
    assert (len(metal.called), len(second.made), len(second.called)) == (1, 1, 1)


@pytest.fixture
def forwarded(metal):
    """The stand-in hands what it was given to the checked build of the host backend."""

    def compute(call):
        program = Program(**metal.made[-1])
        return host.bind(Launch(program, **call))(list(call["inputs"]))

    metal.compute = compute
    with host.checks():
        yield metal


@pytest.mark.parametrize(("few", "multiplied"), [(True, "float"), (False, "bfloat")])
def test_parts_of_bfloat_are_widened_before_the_m3(forwarded, monkeypatch, few, multiplied):
    has_gpu(monkeypatch, "applegpu_g14s" if few else "applegpu_g15s")
    rng, fmt, dtype = np.random.default_rng(0), Format(64, 4), mx.bfloat16
    packed, x = random_packed(rng, 41, 128, fmt, dtype), random(rng, (37, 128), dtype)
    config = qmm_config("metal", 37, 41, 128, dtype, fmt, True)
    with use_backend("metal"):
        y = qmm(x, *packed, None, True, fmt, config)
    check_product(y, x, packed, fmt)
    header = forwarded.made[-1]["header"]
    assert f"#define BFLOAT_PRODUCTS {multiplied}\n" in header and forwarded.called


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal_it_cannot_be_forced():
    with pytest.raises(BackendError, match=r"metal .* mx.metal.is_available\(\) is false"):
        use_backend("metal")
