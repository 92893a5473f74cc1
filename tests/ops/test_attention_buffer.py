"""Attention to the buffer of a cache against float64, for every number of keys that it can hold."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops.attention_buffer import attention_in_buffer, why_not
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests import oracles
from tests.numerics import assert_accurate, assert_same_sums, random, round_to, to64

# B, H, Hkv, L, S, D, Dv, length, the first axes of a mask.
CASES = [
    (1, 4, 2, 1, 40, 64, 64, 17, None),
    (2, 7, 1, 3, 64, 128, 128, 0, (2, 1, 1)),
    (1, 3, 3, 8, 33, 40, 72, 33, (1, 3, 8)),
    (1, 2, 1, 1, 2100, 192, 128, 2000, None),
    (3, 2, 2, 2, 2050, 32, 256, 300, (3, 1, 1)),
    (1, 5, 1, 1, 1, 8, 16, 1, None),
]


@pytest.fixture(
    params=["ops", "host", "checked", pytest.param("cuda", marks=pytest.mark.cuda)], autouse=True
)
def path(request):
    """The reference, the fast and the checked build of the host backend, and CUDA."""
    name = "host" if request.param == "checked" else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield request.param


def make(case, dtype, poison=False):
    """Random arrays, perhaps with NaN in the rows of the buffer that hold nothing; and a mask."""
    batch, heads, kv_heads, queries, size, width, v_width, length, axes = case
    rng = np.random.default_rng(width + length)
    q = random(rng, (batch, heads, queries, width), dtype)
    k, v = (random(rng, (batch, kv_heads, queries, n), dtype) for n in (width, v_width))
    buffers = [random(rng, (batch, kv_heads, size, n), dtype) for n in (width, v_width)]
    mask = None
    if axes is not None:
        mask = rng.random((*axes, size + queries)) < 0.7
        mask[..., length : length + queries] |= np.eye(queries, dtype=bool)[-mask.shape[-2] :]
    if poison:
        for buffer in buffers:
            buffer[:, :, length:] = float("nan")
    return [q, k, v, *buffers, mx.array(length, mx.int32)], mask


def expected(arrays, mask, scale, dtype):
    """The truth and what float32 makes of it, (B, L, H * Dv), and the terms of the sums."""
    q, k, v, k_buffer, v_buffer, length = (to64(a) for a in arrays)
    keys, values = (
        np.concatenate([buffer[:, :, : int(length)], new], axis=2)
        for buffer, new in ((k_buffer, k), (v_buffer, v))
    )
    queries, count = q.shape[2], keys.shape[2]
    seen = np.tri(queries, count, count - queries, dtype=bool)
    if mask is not None:
        seen = seen & mask[..., :count]
    options = dict.fromkeys(("window", "softcap", "sinks")) | {"mask": seen, "scale": scale}
    found = oracles.attention(q, keys, values, **options, dtype=dtype)
    return [a["out"].swapaxes(1, 2).reshape(q.shape[0], queries, -1) for a in found]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, dtype, path):
    if path == "checked" and case[4] > 100 and dtype != mx.float16:
        return
    arrays, mask = make(case, dtype, poison=path != "ops")
    scale = case[5] ** -0.5
    with trace() as launches:
        given = None if mask is None else mx.array(mask)
        out = attention_in_buffer(*arrays, scale=scale, mask=given)
    assert len(launches) == (0 if path == "ops" else 1 if case[4] <= 2048 else 2)
    truth, terms = expected(arrays, mask, scale, np.float64)
    rough, _ = expected(arrays, mask, scale, np.float32)
    assert out.dtype == dtype and out.shape == truth.shape
    assert_accurate(out, truth, round_to(rough, dtype), terms=terms, what=f"{case}")


def test_gradients_are_the_references(path):
    arrays, mask = make(CASES[2], mx.float32)

    def loss(*floats):
        out = attention_in_buffer(*floats, arrays[5], scale=0.2, mask=mx.array(mask))
        return (out * out[..., ::-1]).sum()

    found = mx.grad(loss, list(range(5)))(*arrays[:5])
    with use_backend("ops"):
        wanted = mx.grad(loss, list(range(5)))(*arrays[:5])
    for ours, theirs in zip(found, wanted, strict=True):
        assert mx.abs(theirs).max() > 0
        assert_same_sums(ours, theirs)


def test_one_graph_for_every_length(path):
    """Under ``mx.compile`` nothing depends on the number of keys."""
    if path in ("host", "checked"):  # It runs at once.
        return
    arrays, _ = make(CASES[0], mx.float32)
    compiled = mx.compile(lambda *a: attention_in_buffer(*a, scale=0.1))
    explain(reset=True)
    for length in (0, 1, 17, 40):
        arrays[5] = mx.array(length, mx.int32)
        truth, _ = expected(arrays, None, 0.1, np.float64)
        np.testing.assert_allclose(to64(compiled(*arrays)), truth, rtol=0, atol=1e-6)
    assert sum(d.calls for d in explain() if d.op == "attention_in_buffer") == 1


def test_a_batch_gives_each_member_what_it_gets_alone(path):
    arrays, mask = make(CASES[4], mx.float16)
    given = mx.array(mask)
    together = attention_in_buffer(*arrays, scale=0.2, mask=given)
    for i in range(3):
        alone = [a[i : i + 1] for a in arrays[:5]]
        found = attention_in_buffer(*alone, arrays[5], scale=0.2, mask=given[i : i + 1])
        assert path == "ops" or mx.array_equal(found[0], together[i])


def test_says_where_it_is_not_worth_while():
    assert why_not((1, 4, 9, 64), 256, 64) == "no kernel for these shapes"
    assert why_not((1, 4, 1, 68), 256, 64) == "no kernel for these shapes"
    if not mx.cuda.is_available():
        assert "not measured" in why_not((1, 4, 1, 64), 256, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: mx.zeros((1, 4, 64))}, r"q must be \(B, H, L, D\).*\(1, 4, 64\)"),
        ({0: mx.zeros((1, 4, 1, 64), mx.int32)}, "q must be .* not mlx.core.int32"),
        ({1: mx.zeros((1, 2, 2, 64))}, r"k must be .*\(1, 2, 1, 64\), not .*\(1, 2, 2, 64\)"),
        ({2: mx.zeros((1, 2, 1, 64), mx.float16)}, "v must be .*float32.* not .*float16"),
        ({3: mx.zeros((1, 2, 40, 32))}, r"k_buffer must be .*\(1, 2, 40, 64\)"),
        ({4: mx.zeros((1, 3, 40, 64))}, r"v_buffer must be \(B, Hkv, S, Dv\) for 4 heads"),
        ({4: mx.zeros((2, 2, 40, 64))}, "v_buffer must be .* not .*"),
        ({5: mx.array([3], mx.int32)}, r"length must be one int32, not mlx.core.int32 \(1,\)"),
        ({5: mx.array(3.0)}, "length must be one int32"),
        ({6: mx.ones((1, 41))}, "mask must be bool"),
        ({6: mx.ones((1, 40), mx.bool_)}, r"mask must be bool \(1, 4, 1, 41\), not .*\(1, 40\)"),
    ],
    ids=str,
)
def test_bad_input(change, message):
    arrays, _ = make(CASES[0], mx.float32)
    good = dict(enumerate([*arrays, None])) | change
    with pytest.raises(ValueError, match=message):
        attention_in_buffer(*[good[i] for i in range(6)], scale=1.0, mask=good[6])
