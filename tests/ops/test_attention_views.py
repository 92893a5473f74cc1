"""Inputs that are views of other arrays, sliced, transposed or broadcast, give the same bits."""

from __future__ import annotations

import mlx.core as mx
import pytest
from attention_cases import make
from numerics import random

from mlx_qlayers import attention, use_backend
from mlx_qlayers.ops.attention_step import Rotation, attention_step
from mlx_qlayers.runtime.host import checks
from tests.gpus import HERE

VIEWS = {
    "every second element": lambda a: mx.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: mx.contiguous(a[..., ::-1])[..., ::-1],
    "a part": lambda a: mx.pad(a, [(1, 2)] * a.ndim)[(slice(1, -2),) * a.ndim],
    "transposed": lambda a: mx.contiguous(a.T).T,
    "broadcast": lambda a: mx.broadcast_to(a[:1], a.shape),
    "broadcast along the last axis": lambda a: mx.broadcast_to(a[..., :1], a.shape),
}


@pytest.fixture(params=[False, True], ids=["fast", "checked"], autouse=True)
def build(request):
    with use_backend(HERE), checks(request.param):
        yield


def same(function, arrays, view):
    """The function of every array as a view, one after the other, and of dense copies of these."""
    for i, array in enumerate(arrays):
        if array is None:
            continue
        seen = VIEWS[view](array)
        mx.eval(seen)
        actual, expected = (
            function(*arrays[:i], a, *arrays[i + 1 :]) for a in (seen, mx.contiguous(seen))
        )
        for one, other in zip(actual, expected, strict=True):
            assert mx.array_equal(one, other, equal_nan=True), f"input {i}"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_few_queries(kind, view):
    shape = (2, 4, 2, 3, 70, 64, 64)
    _, arrays, options = make(1, shape, mx.float16, kind, {"sinks": True})
    mask, sinks = options.pop("mask"), options.pop("sinks")
    mask = mx.contiguous(mx.broadcast_to(mask, (2, 4, 3, 70)))

    def run(q, k, v, mask, sinks):
        return [attention(q, k, v, mask=mask, sinks=sinks, **options)]

    same(run, [*arrays, mask, sinks], view)


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("view", VIEWS)
def test_packed_keys_and_values(view, queries):
    _, (q, k, v), options = make(2, (2, 4, 2, queries, 9, 128, 64), mx.float16)

    def run(q, *parts):
        return [attention(q, parts[:3], parts[3:], **options)]

    same(run, [q, *mx.quantize(k, 32, 8), *mx.quantize(v, 32, 8)], view)


@pytest.mark.parametrize("view", VIEWS)
def test_many_queries_and_their_gradients(view):
    shape = (2, 4, 2, 11, 20, 32, 32)
    rng, arrays, options = make(3, shape, mx.float32, "additive", {"sinks": True})
    mask, sinks = options.pop("mask"), options.pop("sinks")
    mask = mx.contiguous(mx.broadcast_to(mask, (2, 4, 11, 20)))
    cotangent = random(rng, (2, 4, 11, 32), mx.float32)

    def run(*given):
        *inputs, cotangent = given

        def forward(q, k, v, mask, sinks):
            return [attention(q, k, v, mask=mask, sinks=sinks, **options)]

        outputs, gradients = mx.vjp(forward, inputs, [cotangent])
        return [*outputs, *gradients]

    same(run, [*arrays, mask, sinks, cotangent], view)


@pytest.mark.parametrize("view", VIEWS)
def test_queries_that_see_no_key(view):
    """More queries than keys: the first ones get the mean of the values."""
    rng, arrays, options = make(4, (2, 4, 2, 20, 11, 32, 32), mx.float32, "causal")
    cotangent = random(rng, (2, 4, 20, 32), mx.float32)

    def run(*given):
        *inputs, cotangent = given
        outputs, gradients = mx.vjp(lambda *a: [attention(*a, **options)], inputs, [cotangent])
        return [*outputs, *gradients]

    same(run, [*arrays, cotangent], view)


@pytest.mark.parametrize("view", VIEWS)
def test_a_step_of_decoding(view):
    rng, (q, k, v), _ = make(5, (2, 4, 2, 1, 40, 32, 32), mx.float16)
    new = [random(rng, (2, 1, 64), mx.float16) for _ in range(2)]
    tails = [random(rng, (2, 2, 20, 32), mx.float16) for _ in range(2)]
    positions = mx.array([17, 5, 22, 25, 17, 17, 17, 17], mx.int32)
    freqs = mx.array(rng.uniform(1, 100, 16).astype("float32"))
    mask = mx.array(rng.random((2, 4, 1, 41)) < 0.7)

    def run(*arrays):
        *arrays, freqs, mask = arrays
        options = {"scale": 0.2, "rotation": Rotation(32, base=None), "freqs": freqs, "mask": mask}
        return attention_step(*arrays, **options)

    same(run, [q.reshape(2, 1, 128), *new, k, v, *tails, positions, freqs, mask], view)
