"""The public sampling operators: gradients, dtypes, transformations, and what they refuse."""

from dataclasses import asdict
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from numerics import assert_accurate, random, round_to, to64
from sampling import (
    GROUPS,
    LONG_CASES,
    assert_as_special,
    check_long,
    golden,
    long_images,
    options_of,
    same_side,
)

from mlx_qlayers.ops.grid_sample import MODES, grid_sample
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.explain import explain
from mlx_qlayers.runtime.tracing import trace
from tests.examples.arrays import running
from tests.gpus import GPUS

PATHS = ["reference", "checked", *GPUS]


@pytest.fixture(autouse=True, params=["reference", "host", *GPUS])
def backend(request):
    with running(request.param):
        yield "host" if request.param == "checked" else request.param


def by_golden(group):
    """Golden values, and of each mode, padding and alignment its place, options and results."""
    values = golden(group)
    x, grid, cotangent = (mx.array(values[name]) for name in ("x", "grid", "cotangent"))
    for index, options in options_of(values):
        sample = partial(grid_sample, **asdict(options))
        out, gradients = mx.vjp(lambda *a, f=sample: [f(*a)], [x, grid], [cotangent])
        with use_backend("reference"):
            parts = mx.vjp(lambda x, f=sample, g=grid: [f(x, g)], [x], [mx.abs(cotangent)])[1][0]
        yield values, index, options, [*out, *gradients], np.abs(to64(parts)).max()


@pytest.mark.parametrize("backend", PATHS, indirect=True)
@pytest.mark.parametrize("group", GROUPS)
def test_golden(group):
    for values, index, options, found, parts in by_golden(group):
        for name, actual in zip(("out", "d_x", "d_grid"), found, strict=True):
            truth, rounded = values[name][index], values[name + "32"][index]
            what = f"{group} {options} {name}"
            # Atomics add what each point gives to a pixel in any order; those parts cancel.
            terms = parts if name == "d_x" else 0.0
            assert_accurate(actual, same_side(truth, rounded), rounded, terms=terms, what=what)
            if name == "out" and options.mode == "nearest":
                np.testing.assert_array_equal(np.array(actual), rounded, err_msg=what)


@pytest.mark.parametrize("backend", PATHS, indirect=True)
@pytest.mark.parametrize("group", ["2d_special", "3d_special"])
def test_golden_nan_and_infinite_coordinates(group):
    for values, index, options, found, _ in by_golden(group):
        assert_as_special(found, values, index, options)


def inputs(seed, shape=(2, 5, 7, 3), out=(4, 6), dtype=mx.float32, reach=1.3):
    rng = np.random.default_rng(seed)
    grid = rng.uniform(-reach, reach, (shape[0], *out, len(out)))
    return random(rng, shape, dtype), round_to(grid, dtype), random(rng, (*out, shape[-1]), dtype)


@pytest.mark.parametrize("backend", ["host", *GPUS], indirect=True)
@pytest.mark.parametrize("asked, missing", [(0, "gradient_grid"), (1, "gradient_x")])
def test_only_the_gradient_that_is_asked_for_is_computed(backend, asked, missing):
    x, grid, _ = inputs(10)
    with trace() as launches:
        mx.eval(mx.grad(lambda x, grid: grid_sample(x, grid).sum(), asked)(x, grid))
    # Elsewhere than on the host a launch is a node of MLX's graph, and this one is not evaluated.
    assert backend != "host" or not any(missing in launch.kernel for launch in launches)
    assert len(launches) > 1


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 4, 5, 2), (1, 4, 5, 3, 2)], ids=["image", "volume"])
def test_what_is_outside_is_zero_whatever_the_border_pixels_hold(shape, mode, odd):
    mode = mode if len(shape) == 4 else "bilinear"
    inner = (0, *(slice(1, n - 1) for n in shape[1:-1]))
    x = mx.full(shape, odd)
    x[inner] = 1.0
    far = mx.full((1, *[2] * (len(shape) - 2), len(shape) - 2), 9.0)
    (out,), (d_x, d_grid) = mx.vjp(
        lambda *args: [grid_sample(*args, mode=mode)], [x, far], [mx.ones((*far.shape[:-1], 2))]
    )
    assert not any(a.any().item() for a in (out, d_x, d_grid))
    # Nor does what comes back for a point outside reach a pixel.
    cotangent = mx.full((*far.shape[:-1], 2), odd)
    d_x = mx.vjp(lambda x: [grid_sample(x, far, mode=mode)], [x], [cotangent])[1][0]
    assert not d_x.any().item()


@pytest.mark.parametrize(("mode", "padding_mode"), LONG_CASES)
def test_axis_of_more_pixels_than_a_float_counts(mode, padding_mode):
    x, grid, cotangent = long_images()
    sample = partial(grid_sample, mode=mode, padding_mode=padding_mode)
    out, gradients = mx.vjp(lambda *args: [sample(*args)], [x, grid], [cotangent])
    check_long([*out, *gradients], mode, padding_mode)


@pytest.mark.parametrize("backend", ["host"], indirect=True)
@pytest.mark.skipif(
    mx.metal.is_available() or mx.cuda.is_available(), reason="a GPU goes before the host"
)
def test_auto_uses_the_host_where_it_is_not_compiled():
    x, grid, _ = inputs(9)
    explain(reset=True)
    with use_backend("auto"):
        mx.eval(mx.compile(grid_sample)(x, grid), grid_sample(x, grid))
        mx.eval(grid_sample(x, grid, mode="nearest"))
        mx.eval(grid_sample(mx.zeros((1, 8, 8, 256)), mx.zeros((1, 64, 64, 2)), mode="nearest"))
    found = sorted((d.path, d.calls) for d in explain() if d.op == "grid_sample")
    assert found == [("host", 1), ("host", 1), ("reference", 1), ("reference", 1)]
