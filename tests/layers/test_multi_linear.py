"""QMultiLinear is mlx-lm's layer, and multiplies each head of a batch with its own matrix."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import QuantizedMultiLinear

from mlx_qlayers import use_backend
from mlx_qlayers.conversion.plan import counterpart_of, stock_of
from mlx_qlayers.formats import Format
from mlx_qlayers.layers.multi_linear import QMultiLinear
from mlx_qlayers.reference.quantized_matmul import by_matrix
from tests.gpus import GPUS
from tests.numerics import assert_same_sums, to64

SHAPES = [(1, 4, 1), (3, 4, 1), (2, 4, 5), (3, 1, 2)]


def layer() -> Any:
    mx.random.seed(0)
    return QMultiLinear(64, 96, 4, 32, 4, "affine")


def by_dense(ours: Any, x: mx.array, transpose: bool) -> mx.array:
    dense = mx.dequantize(ours.weight, ours.scales, ours.biases, ours.group_size, ours.bits)
    # On CUDA MLX multiplies dense float32 matrices in TF32.
    with mx.stream(mx.cpu):
        return x @ (dense.swapaxes(1, 2) if transpose else dense)


@pytest.mark.parametrize("backend", ["auto", "reference", *GPUS])
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_head_has_its_matrix(shape: tuple[int, ...], transpose: bool, backend: str) -> None:
    ours = layer()
    x = mx.random.normal((*shape, 64 if transpose else 96))
    with use_backend("reference" if backend == "reference" else "auto"):
        found, expected = to64(ours(x, transpose)), to64(by_dense(ours, x, transpose))
    # Of float32 MLX's product on CUDA keeps what TF32 does.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_broadcasting(shape: tuple[int, ...]) -> None:
    """As on CUDA."""
    ours, x = layer(), mx.random.normal((*shape, 64))
    packed = ours.weight, ours.scales, ours.biases
    y = by_matrix(x, *packed, transpose=True, fmt=Format(32, 4))
    assert_same_sums(y, by_dense(ours, x, True))


def test_is_the_stock_layer() -> None:
    stock = QuantizedMultiLinear(64, 96, 4, 32, 4, "affine")
    ours: Any = QMultiLinear.from_quantized(stock)
    assert counterpart_of(QuantizedMultiLinear) is QMultiLinear
    assert stock_of(ours) is QuantizedMultiLinear and ours.weight is stock.weight
    assert mx.array_equal(ours(x := mx.ones((1, 4, 2, 64))), stock(x))
