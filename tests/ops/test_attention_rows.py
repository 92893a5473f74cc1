"""Attention to the rows of a buffer that count: the numbers of a slice, by one plan for all."""

import mlx.core as mx
import pytest

from mlx_qlayers import attention, use_backend
from mlx_qlayers.dispatch import dispatch
from mlx_qlayers.ops.attention import ATTENTION_ROWS
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.tracing import trace


def call(q, k, v, sinks, count):
    arrays = q, k, v, None, sinks, mx.array([count], mx.int32)
    (out,) = dispatch(ATTENTION_ROWS, arrays, (0.3, q.shape[2] > 1))
    return out


@pytest.mark.parametrize(("length", "sinking"), [(1, False), (1, True), (5, True), (7, False)])
@pytest.mark.parametrize("backend", ["host", "reference"])
def test_rows_that_count(backend, length, sinking):
    """Rows behind them are not read, whatever they hold."""
    mx.random.seed(0)
    q, k, v = (mx.random.normal(s) for s in ((3, 6, length, 40), (3, 2, 41, 40), (3, 2, 41, 24)))
    sinks = mx.random.normal((6,)) if sinking else None
    with use_backend(backend), trace() as launches, checks():
        for count in (7, 11, 32, 41):
            k[:, :, count:], v[:, :, count:] = mx.nan, mx.nan
            rows, rule = (k[:, :, :count], v[:, :, :count]), "causal" if length > 1 else None
            want = attention(q, *rows, scale=0.3, mask=rule, sinks=sinks)
            assert mx.abs(call(q, k, v, sinks, count) - want).max() < 1e-6
            k, v = (mx.where(mx.isnan(x), 0.5, x) for x in (k, v))
    counted = [each.kernel for each in launches if each.kernel.endswith("_counted")]
    assert len(counted) == (4 if backend == "host" else 0)


def test_a_count_is_one_number():
    q, k = mx.ones((1, 4, 1, 64)), mx.ones((1, 2, 24, 64))
    with pytest.raises(ValueError, match="held must be int32"):
        dispatch(ATTENTION_ROWS, (q, k, k, None, None, mx.array([1.0])), (0.3, False))
