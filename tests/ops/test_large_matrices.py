"""Products with matrices whose elements 32 bits do not count."""

import mlx.core as mx
import pytest

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.runtime import trace
from tests.ops.test_quantized_matmul import AFFINE
from tests.packed import check_product


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [3, 33, 200])
def test_more_than_2_to_the_31_elements(rows):
    """The first rows and the last, and a gradient that comes from these alone."""
    n, k, ends = 131136, 16384, 32
    assert n * k > 2**31
    mx.random.seed(rows)
    scales = mx.random.uniform(0.01, 0.02, (n, k // 64)).astype(mx.bfloat16)
    w = mx.random.randint(-(2**31), 2**31 - 1, (n, k // 8), mx.int32).view(mx.uint32)
    packed = w, scales, -8 * scales
    x, dy = (mx.random.normal((rows, m)).astype(mx.bfloat16) for m in (k, n))
    dy = mx.where(abs(mx.arange(n) - (n - 1) / 2) > n / 2 - ends, dy, 0).astype(mx.bfloat16)
    with use_backend("cuda"), trace() as launches:
        (y,), (dx,) = mx.vjp(lambda x: quantized_matmul(x, *packed), [x], [dy])
        mx.eval(y, dx)
    assert len(launches) >= 2
    part, y, dy = (
        [mx.concatenate([a[:ends], a[-ends:]]) for a in packed],
        *(mx.concatenate([a[:, :ends], a[:, -ends:]], axis=1) for a in (y, dy)),
    )
    check_product(y, x, part, AFFINE)
    check_product(dx, dy, part, AFFINE, transpose=False)
