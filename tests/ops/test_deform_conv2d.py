"""Deformable convolution against torchvision's golden values, on every path; and its module."""

import mlx.core as mx
import numpy as np
import pytest
from numerics import assert_accurate, assert_same_sums, behind_one, random, to64
from sampling import golden

from mlx_qlayers import DeformConv2d, deform_conv2d, use_backend
from tests.gpus import GPUS

ARRAYS = ("x", "offset", "weight", "bias", "mask")


@pytest.fixture(autouse=True, params=["reference", "host", *GPUS])
def backend(request):
    with use_backend(request.param):
        yield request.param


def options_of(given):
    pairs = map(tuple, given["options"].tolist())
    return dict(zip(("stride", "padding", "dilation"), pairs, strict=True))


@pytest.mark.parametrize("name", ["v1", "groups", "pointwise"])
def test_golden(name):
    given = golden(name, "deform_conv2d")
    arrays = {key: mx.array(given[key]) for key in ARRAYS if key in given}

    def run(*values):
        return [deform_conv2d(**dict(zip(arrays, values, strict=True)), **options_of(given))]

    cotangent = mx.array(given["cotangent"])
    out, gradients = mx.vjp(run, list(arrays.values()), [cotangent])
    # Sums over all outputs.
    size = {key: np.abs(given[key]).max() for key in ("x", "weight")}
    total = np.abs(to64(cotangent)).reshape(-1, cotangent.shape[3]).sum(0).max()
    terms_of = {"d_bias": total, "d_weight": total * size["x"]}
    for key, found in zip(["out", *(f"d_{key}" for key in arrays)], out + gradients, strict=True):
        terms = terms_of.get(key, 0.0)
        assert_accurate(found, given[key], given[key + "32"], terms=terms, what=f"{name} {key}")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_views_that_begin_anywhere(dtype, allow_tf32):
    # cuBLAS refuses such operands, 8 or 64 of whose columns would be read 16 bytes at a time.
    rng = np.random.default_rng(6)
    shapes = (2, 6, 5, 16), (2, 6, 5, 36), (8, 3, 3, 8)
    arrays = [random(rng, shape, dtype) for shape in shapes]
    cotangent = random(rng, (2, 6, 5, 8), dtype)

    def run(*given):
        return [deform_conv2d(*given, padding=1, allow_tf32=allow_tf32)]

    out, gradients = mx.vjp(run, arrays, [cotangent])
    y, views = mx.vjp(run, [behind_one(a) for a in arrays], [behind_one(cotangent)])
    for one, other in zip(out + gradients, y + views, strict=True):
        assert_same_sums(one, other)


def test_without_offsets_it_is_the_module_of_mlx():
    mx.random.seed(1)
    layer = DeformConv2d(4, 6, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2), groups=2)
    x = mx.random.normal((2, 7, 8, 4))
    stock = mx.conv2d(x, layer.weight, 2, (1, 0), (1, 2), 2) + layer.bias
    assert_same_sums(layer(x, mx.zeros((*stock.shape[:3], 12))), stock)
    assert sorted(layer.parameters()) == ["bias", "weight"]
    assert "kernel_size=(3, 2), stride=2, padding=(1, 0), dilation=(1, 2)" in repr(layer)
    with pytest.raises(ValueError, match="groups 3 must divide 4 and 6"):
        DeformConv2d(4, 6, 3, groups=3)
