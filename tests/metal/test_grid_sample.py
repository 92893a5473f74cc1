"""The sampling kernels on every backend that is here, against PyTorch's golden values."""

import os
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from numerics import assert_accurate, random, round_to, to64
from pairwise import in_turn, pairwise

from mlx_qlayers.metal.common import kernels as common
from mlx_qlayers.metal.grid_sample import launch as kernels
from mlx_qlayers.metal.grid_sample.launch import GridSampleConfig, heuristic
from mlx_qlayers.options import Sampling
from mlx_qlayers.reference import grid_sample as reference
from mlx_qlayers.runtime.backend import backend as current_backend
from mlx_qlayers.runtime.backend import use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from mlx_qlayers.runtime.tracing import trace
from tests.examples.arrays import LAID_OUT
from tests.gpus import GPUS, on_gpus


def given(x, grid, options, config=None):
    """The arguments of launches; by default with the current backend's own configuration."""
    own = heuristic(x.shape[-1], x.dtype, current_backend(), options.deterministic)
    return Spec.of(x), Spec.of(grid), options, config or own


def forward(x, grid, options, config=None):
    return kernels.grid_sample(*given(x, grid, options, config))(x, grid)


def run(x, grid, cotangent, options, config=None):
    """The output, and the gradients of x and grid."""
    plan, arrays = given(x, grid, options, config), (x, grid, cotangent)
    gradients = kernels.gradient_x, kernels.gradient_grid
    return [kernels.grid_sample(*plan)(x, grid), *(make(*plan)(*arrays) for make in gradients)]


@pytest.mark.parametrize("dtype, channels", [(mx.float32, 3), (mx.float16, 3), (mx.bfloat16, 1)])
def test_neighbours_that_are_read_together(backend, dtype, channels):
    """Of rows that lie apart, pixels too, and at either end of what there is."""
    config = replace(heuristic(channels, dtype, "cuda"), near=True)
    x, grid, cotangent = inputs(2, (3, 5, 8, channels), dtype=dtype)
    wide = mx.contiguous(mx.repeat(x, 2, axis=2))
    edge = mx.array([-0.999, 0.999])
    grid[:, 0, :2] = mx.stack([edge, edge], -1)
    for pixels in (x, x[1:, 1:-1, 1:], wide[:, :, ::2], mx.broadcast_to(x[:1], x.shape)):
        given = pixels, grid[: len(pixels)], cotangent[: len(pixels)]
        check(run(*given, Sampling(), config), *given, Sampling())


@pytest.mark.parametrize("dtype, channels", [(mx.float16, 12), (mx.bfloat16, 3)])
def test_few_points_of_large_images_in_half_precision(backend, dtype, channels):
    """Only pixels that points touch, some of them twice, have sums."""
    x, grid, cotangent = inputs(4, (2, 16, 17, channels), (4, 8), dtype)
    grid[:, 0] = grid[:, 1]
    config = heuristic(channels, dtype, "cuda")
    with trace() as launches:
        found = run(x, grid, cotangent, Sampling(), config)
        mx.eval(found)
    check(found, x, grid, cotangent, Sampling())
    assert [launch.kernel for launch in launches][1:5] == [
        "grid_sample_list_terms",
        "grid_sample_find_rows",
        "grid_sample_gradient_x_rows",
        "grid_sample_gradient_x_spread",
    ]


def inputs(seed, shape=(2, 5, 7, 12), out=(4, 6), dtype=mx.float32, grid_dtype=mx.float32):
    rng = np.random.default_rng(seed)  # A generator goes through as it is.
    grid = round_to(rng.uniform(-1.3, 1.3, (shape[0], *out, len(out))), grid_dtype)
    return random(rng, shape, dtype), grid, random(rng, (*grid.shape[:-1], shape[-1]), dtype)


def expected(x, grid, cotangent, options):
    """The same in plain operators and float32."""
    x, grid, cotangent = (array.astype(mx.float32) for array in (x, grid, cotangent))
    return [
        reference.grid_sample(x, grid, options),
        *reference.grid_sample_vjp(x, grid, cotangent, options),
    ]


def check(found, x, grid, cotangent, options):
    """Compare with plain operators; sums may be taken in another order."""
    size, points = max(x.shape[1:-1]), to64(cotangent).reshape(-1, x.shape[-1])
    taps = {"nearest": 1, "bilinear": 2, "bicubic": 4}[options.mode] ** grid.shape[-1]
    largest, share = np.abs(to64(x)).max(), np.abs(points)
    terms = taps * largest, taps * share.sum(0).max(), taps * size * share.sum(1).max() * largest
    truths = expected(x, grid, cotangent, options)
    for name, actual, truth, sum_of_terms in zip(
        ["out", "d_x", "d_grid"], found, truths, terms, strict=True
    ):
        assert actual.dtype == (grid if name == "d_grid" else x).dtype
        rounded = truth.astype(actual.dtype)
        what = f"{name} of x {x.shape} grid {grid.shape}, {options}"
        assert_accurate(actual, to64(truth), rounded, terms=sum_of_terms, what=what)


# As on a GPU: several threads a point, wide loads, and both ways to add up the gradient of x.
CONFIGS = [
    GridSampleConfig(4, 16, 4, 1, 16, "atomics", threads=64),
    GridSampleConfig(2, 8, 8, 3, 4, "sorted", threads=32),
    GridSampleConfig(1, 4, 32, 1, 32, "sorted", threads=256),
    GridSampleConfig(3, 4, 1, 2, 1, "atomics", threads=7),
    GridSampleConfig(4, 4, scatter="bands", bands=5),
]


@pytest.mark.parametrize(
    ("config", "shape"), in_turn(pairwise(CONFIGS), [(2, 5, 7, 12), (2, 3, 2, 4, 12)]), ids=str
)
def test_every_configuration(backend, config, shape):
    x, grid, cotangent = inputs(1, shape, (3,) * (len(shape) - 2))
    options = Sampling(padding_mode="reflection")
    check(run(x, grid, cotangent, options, config), x, grid, cotangent, options)


@pytest.mark.parametrize(
    ("dtype", "grid_dtype", "mode", "device"),
    in_turn(
        pairwise((mx.float16, mx.bfloat16), (mx.float32, mx.float16)),
        *(("bilinear", "bicubic"), ("host", "cuda")),
    ),
    ids=str,
)
def test_half_precision(backend, dtype, grid_dtype, mode, device):
    arrays = inputs(2, (1, 5, 7, 16), dtype=dtype, grid_dtype=grid_dtype)
    options = Sampling(mode)
    check(run(*arrays, options, heuristic(16, dtype, device)), *arrays, options)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 2, 3), (3, 1, 9, 5), (1, 2, 2, 256)])
def test_one_pixel_one_channel_and_many(backend, shape):
    arrays = inputs(3, shape, (1, 3))
    check(run(*arrays, Sampling()), *arrays, Sampling())


VIEWS = [
    "transposed",
    "rows backwards",
    "backwards",
    "every second",
    "part",
    "behind one",
    "broadcast",
]


@pytest.mark.parametrize("view", VIEWS)
def test_strided_x_is_read_in_place(backend, view):
    x, grid, cotangent = inputs(4)
    x = LAID_OUT[view](x)
    check(run(x, grid, cotangent, Sampling(), CONFIGS[0]), x, grid, cotangent, Sampling())


@pytest.mark.parametrize("backend", ["host", *GPUS], indirect=True)
@pytest.mark.parametrize("view", VIEWS)
def test_strided_x_is_not_copied(backend, view):
    x, grid, _ = inputs(11, (2, 64, 96, 12), (3, 3))
    x = LAID_OUT[view](x)
    cotangent = mx.ones((*grid.shape[:-1], 12))
    mx.eval(x, grid, cotangent)
    plan = given(x, grid, Sampling())
    launches = (kernels.grid_sample(*plan), kernels.gradient_grid(*plan))
    for launch, arrays in zip(launches, ([x, grid], [x, grid, cotangent]), strict=True):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(launch(*arrays))
        assert mx.get_peak_memory() - before < x.nbytes / 8


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_nothing_outside_x_is_read(mode, gpu):
    """All memory around x is NaN, and as many bytes are read as points have pixels inside."""
    rng = np.random.default_rng(12)
    size, channels = np.array([7, 5]), 4
    around = mx.full((3, 9, 11, channels), float("nan"))
    around[1:2, 2:7, 2:9] = random(rng, (1, 5, 7, channels))
    x = around[1:2, 2:7, 2:9]
    grid = round_to(rng.uniform(-2, 2, (1, 6, 10, 2)), mx.float32)
    pixel = ((to64(grid) + 1) * size - 1).reshape(-1, 2) / 2
    low = np.round(pixel) if mode == "nearest" else np.floor(pixel)
    steps = {"nearest": [0], "bilinear": [0, 1], "bicubic": [-1, 0, 1, 2]}[mode]
    taps = np.concatenate([low + np.array([i, j]) for i in steps for j in steps])
    inside = ((taps >= 0) & (taps < size)).all(axis=1)
    config = heuristic(channels, mx.float32, "cuda" if gpu else "host")
    with use_backend("host"), checks() as report:
        out = forward(x, grid, Sampling(mode), config)
    assert mx.isfinite(out).all()
    assert report.total("bytes_read") == inside.sum() * channels * 4 + grid.nbytes
    distinct = len(np.unique(taps[inside], axis=0))
    assert report.total("distinct_read") == distinct * channels * 4 + grid.nbytes


def test_threads_in_several_rows(backend, monkeypatch):
    monkeypatch.setattr(common, "_ROW", 128)
    arrays = inputs(5, (2, 5, 7, 12), (9, 11))
    check(run(*arrays, Sampling(), CONFIGS[0]), *arrays, Sampling())
    check(run(*arrays, Sampling(), CONFIGS[1]), *arrays, Sampling())


def test_deterministic_sum_of_many_shares_of_one_pixel(backend):
    x, _, cotangent = inputs(6, (2, 5, 7, 3), (30, 40))
    grid = random(np.random.default_rng(6), (2, 30, 40, 2), scale=3)
    options = Sampling(padding_mode="border", deterministic=True)
    config = heuristic(3, mx.float32, "cuda", True)
    assert config.scatter == "sorted"
    launch = kernels.gradient_x(*given(x, grid, options, config))
    runs = [launch(x, grid, cotangent) for _ in range(3)]
    assert all(mx.array_equal(run, runs[0]) for run in runs)
    exact = kernels.gradient_x(*given(x, grid, options))(x, grid, cotangent)
    terms = np.abs(to64(cotangent)).reshape(-1, 3).sum(0).max()
    assert_accurate(runs[0], to64(exact), exact, terms=terms)


def apart(channels):
    """Points so far apart that no two share a pixel, and what they read and write in bytes."""
    x = random(np.random.default_rng(8), (1, 32, 32, channels))
    rows = mx.arange(1.5, 32, 4) * (2 / 32) - 1
    grid = mx.stack(mx.meshgrid(rows, rows, indexing="xy"), axis=-1)[None] + 0.01
    points = grid.size // 2
    return x, grid, 4 * points * (4 * channels + 2), 4 * points * channels


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("channels", [3, 5, 64])
def test_forward_reads_each_needed_byte_once(channels, gpu):
    x, grid, needed, written = apart(channels)
    config = heuristic(channels, mx.float32, "cuda" if gpu else "host")
    with use_backend("host"), checks() as report:
        forward(x, grid, Sampling(), config)
    assert report.total("bytes_read") == report.total("distinct_read")
    # Neighbours come in packs of 16 bytes, three at most for each of two rows.
    packs = 2 * (48 - 24) * (grid.size // 2) if config.near else 0
    assert needed <= report.total("bytes_read") <= needed + packs
    assert report.total("bytes_written") == report.total("distinct_written") == written


def test_wide_loads_where_alignment_allows():
    x, grid, _, _ = apart(64)
    options, loads = Sampling("bicubic"), {}
    for name, view in (("packs", x), ("single", LAID_OUT["transposed"](x))):
        with use_backend("host"), checks() as report:
            forward(view, grid, options, heuristic(64, mx.float32, "cuda"))
            loads[name] = report.total("loads")
    assert loads["packs"] < 0.4 * loads["single"]


def test_too_many_points():
    assert kernels.covers(mx.zeros((1, 1, 1, 2)), Sampling("bicubic", deterministic=True))
    many = mx.broadcast_to(mx.zeros(1), (2**10, 2**10, 2**9, 2))
    assert kernels.covers(many, Sampling())
    assert not kernels.covers(many, Sampling(deterministic=True))


@on_gpus
def test_offsets_beyond_32_bits(gpu):
    """The last pixels of an image of 2^32 elements and 8 GB, forward and backward."""
    facts = mx.device_info(mx.gpu)
    memory = facts.get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if min(memory, 4 * facts.get("max_buffer_length", memory)) < 2**35:
        pytest.skip("needs 32 GB")
    x = mx.zeros((1, 2**12, 2**12, 2**8), mx.float16)
    x[:, -1, -1] = 1
    x[:, -1, -2] = 3
    grid = mx.array([1 - 2.0**-12, 1 - 2.0**-12]).reshape(1, 1, 1, 2)
    options = Sampling(align_corners=False)
    with use_backend(gpu):
        out, d_x, d_grid = run(x, grid, mx.ones((1, 1, 1, x.shape[-1]), x.dtype), options)
    assert (
        out.tolist()
        == reference.grid_sample(x[:, -4:, -4:], mx.array([[[[0.75, 0.75]]]]), options).tolist()
    )
    assert d_x[:, -1, -1].min().item() == 1
    assert mx.abs(d_x).sum(axis=(0, 1, 2)).max().item() == 1
    assert d_grid.shape == grid.shape
