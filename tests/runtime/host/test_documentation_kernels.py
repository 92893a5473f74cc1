"""The kernels of MLX's documentation on custom kernels, run as MLX would generate them.

Source: https://ml-explore.github.io/mlx/build/html/dev/custom_metal_kernels.html
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime.host import OutOfBounds, bind, checks
from mlx_qlayers.runtime.launch import Launch
from mlx_qlayers.runtime.program import Program
from mlx_qlayers.runtime.spec import Spec
from tests.numerics import assert_accurate, assert_function

EXP = "uint elem = thread_position_in_grid.x; T tmp = inp[elem]; out[elem] = metal::exp(tmp);"
EXP_STRIDED = """
uint elem = thread_position_in_grid.x;
auto loc = elem_to_loc(elem, inp_shape, inp_strides, inp_ndim);
T tmp = inp[loc];
out[elem] = metal::exp(tmp);
"""
_CORNERS = """
int H = x_shape[1], W = x_shape[2], C = x_shape[3];
int gH = grid_shape[1], gW = grid_shape[2];
int w_stride = C, h_stride = W * C, b_stride = H * W * C;
float ix = ((grid[grid_idx] + 1) * W - 1) / 2;
float iy = ((grid[grid_idx + 1] + 1) * H - 1) / 2;
int ix_nw = floor(ix), iy_nw = floor(iy), ix_se = ix_nw + 1, iy_se = iy_nw + 1;
T nw = (ix_se - ix) * (iy_se - iy), ne = (ix - ix_nw) * (iy_se - iy);
T sw = (ix_se - ix) * (iy - iy_nw), se = (ix - ix_nw) * (iy - iy_nw);
bool in_nw = iy_nw >= 0 && iy_nw < H && ix_nw >= 0 && ix_nw < W;
bool in_ne = iy_nw >= 0 && iy_nw < H && ix_se >= 0 && ix_se < W;
bool in_sw = iy_se >= 0 && iy_se < H && ix_nw >= 0 && ix_nw < W;
bool in_se = iy_se >= 0 && iy_se < H && ix_se >= 0 && ix_se < W;
"""
FORWARD = (
    "uint elem = thread_position_in_grid.x; uint grid_idx = elem / x_shape[3] * 2;"
    + _CORNERS
    + """
int base = int(elem) / C / gH / gW * b_stride + int(elem) % C;
T I_nw = x[base + iy_nw * h_stride + ix_nw * w_stride];
T I_ne = x[base + iy_nw * h_stride + ix_se * w_stride];
T I_sw = x[base + iy_se * h_stride + ix_nw * w_stride];
T I_se = x[base + iy_se * h_stride + ix_se * w_stride];
out[elem] = nw * (in_nw ? I_nw : T(0)) + ne * (in_ne ? I_ne : T(0)) +
    sw * (in_sw ? I_sw : T(0)) + se * (in_se ? I_se : T(0));
"""
)
# One SIMD group has 32 channels of one sample: it sums before it adds to the grid's gradient.
BACKWARD = (
    "uint elem = thread_position_in_grid.x; uint grid_idx = elem / x_shape[3] * 2;"
    + _CORNERS
    + """
int base = int(elem) / C / gH / gW * b_stride + int(elem) % C;
T cot = cotangent[elem], gix = 0, giy = 0;
int offset = base + iy_nw * h_stride + ix_nw * w_stride;
if (in_nw) {
  atomic_fetch_add_explicit(&x_grad[offset], nw * cot, memory_order_relaxed);
  gix -= x[offset] * (iy_se - iy) * cot;
  giy -= x[offset] * (ix_se - ix) * cot;
}
offset = base + iy_nw * h_stride + ix_se * w_stride;
if (in_ne) {
  atomic_fetch_add_explicit(&x_grad[offset], ne * cot, memory_order_relaxed);
  gix += x[offset] * (iy_se - iy) * cot;
  giy -= x[offset] * (ix - ix_nw) * cot;
}
offset = base + iy_se * h_stride + ix_nw * w_stride;
if (in_sw) {
  atomic_fetch_add_explicit(&x_grad[offset], sw * cot, memory_order_relaxed);
  gix -= x[offset] * (iy - iy_nw) * cot;
  giy += x[offset] * (ix_se - ix) * cot;
}
offset = base + iy_se * h_stride + ix_se * w_stride;
if (in_se) {
  atomic_fetch_add_explicit(&x_grad[offset], se * cot, memory_order_relaxed);
  gix += x[offset] * (iy - iy_nw) * cot;
  giy += x[offset] * (ix - ix_nw) * cot;
}
gix = simd_sum(gix);
giy = simd_sum(giy);
if (thread_index_in_simdgroup == 0) {
  atomic_fetch_add_explicit(&grid_grad[grid_idx], gix * W / 2, memory_order_relaxed);
  atomic_fetch_add_explicit(&grid_grad[grid_idx + 1], giy * H / 2, memory_order_relaxed);
}
"""
)


def run(
    name: str,
    source: str,
    inputs: dict[str, mx.array],
    outputs: dict[str, Sequence[int]],
    *,
    init_value: float | None = None,
    contiguous: bool = True,
) -> list[mx.array]:
    """One thread for each element of the last input, and of the first output."""
    program = Program(
        name=name,
        header="",
        source=source,
        input_names=tuple(inputs),
        output_names=tuple(outputs),
        atomic_outputs=init_value is not None,
        ensure_row_contiguous=contiguous,
    )
    arrays = list(inputs.values())
    shapes = [tuple(s) for s in outputs.values()]
    size = arrays[-1].size if init_value is not None else int(np.prod(shapes[0]))
    dtypes = [arrays[0].dtype] * len(shapes)
    template = [("T", arrays[0].dtype)]
    specs, sizes = [Spec.of(x) for x in arrays], ((size, 1, 1), (256, 1, 1))
    return bind(Launch(program, specs, template, *sizes, shapes, dtypes, init_value))(arrays)


@pytest.fixture(params=[True, False], ids=["checked", "fast"])
def build(request: pytest.FixtureRequest):
    with checks(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_exp(build: bool, dtype: mx.Dtype) -> None:
    x = mx.random.normal((4, 13), key=mx.random.key(1)).astype(dtype)
    (y,) = run("exp", EXP, {"inp": x}, {"out": x.shape})
    assert y.dtype == dtype
    assert_function(y, np.exp, x)


def test_exp_of_a_strided_input(build: bool) -> None:
    x = mx.random.normal((13, 4), key=mx.random.key(2))[::3].T
    (y,) = run("exp_strided", EXP_STRIDED, {"inp": x}, {"out": x.shape}, contiguous=False)
    assert y.shape == (4, 5)
    assert_function(y, np.exp, x)


def _sample(reach: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 6, 8, 32)).astype(np.float32)
    return x, rng.uniform(-reach, reach, (2, 4, 6, 2)).astype(np.float32)


def _truth(
    x: np.ndarray, grid: np.ndarray, cotangent: np.ndarray | None = None
) -> list[np.ndarray]:
    """Bilinear sampling with zeros outside, in float64; with a cotangent, its gradients."""
    _, h, w, _ = x.shape
    ix, iy = ((grid[..., 0] + 1) * w - 1) / 2, ((grid[..., 1] + 1) * h - 1) / 2
    x0, y0 = np.floor(ix).astype(int), np.floor(iy).astype(int)
    batch = np.arange(len(x))[:, None, None]
    out = np.zeros((*grid.shape[:3], x.shape[3]))
    dx, dgrid = np.zeros(x.shape), np.zeros(grid.shape)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        cx, cy = x0 + j, y0 + i
        inside = (cx >= 0) & (cx < w) & (cy >= 0) & (cy < h)
        at = batch, np.clip(cy, 0, h - 1), np.clip(cx, 0, w - 1)
        value = x[at] * inside[..., None]
        wx, wy = 1 - np.abs(ix - cx), 1 - np.abs(iy - cy)
        out += (wx * wy)[..., None] * value
        if cotangent is not None:
            np.add.at(dx, at, (wx * wy * inside)[..., None] * cotangent)
            dot = (value * cotangent).sum(-1)
            dgrid[..., 0] += (1 if j else -1) * wy * dot * w / 2
            dgrid[..., 1] += (1 if i else -1) * wx * dot * h / 2
    return [out] if cotangent is None else [dx, dgrid]


def test_grid_sample(build: bool) -> None:
    # The build without checks also reads where the kernel should not: beside the image.
    x, grid = _sample(0.6)
    shape = (*grid.shape[:3], x.shape[3])
    (y,) = run("sample", FORWARD, {"x": mx.array(x), "grid": mx.array(grid)}, {"out": shape})
    truth = _truth(x.astype(np.float64), grid.astype(np.float64))[0]
    assert_accurate(y, truth, _truth(x, grid)[0].astype(np.float32))


def test_grid_sample_reads_out_of_bounds() -> None:
    """The documentation's kernel reads before it asks whether it may; a GPU lets that pass."""
    x, grid = _sample(1.2)
    shape = (*grid.shape[:3], x.shape[3])
    with checks(), pytest.raises(OutOfBounds, match=r"buffer 0 \(x\).*kernel sample"):
        run("sample", FORWARD, {"x": mx.array(x), "grid": mx.array(grid)}, {"out": shape})


def test_grid_sample_gradient(build: bool) -> None:
    x, grid = _sample(1.2)
    cotangent = np.random.default_rng(4).normal(size=(*grid.shape[:3], 32)).astype(np.float32)
    inputs = {"x": mx.array(x), "grid": mx.array(grid), "cotangent": mx.array(cotangent)}
    outputs = {"x_grad": x.shape, "grid_grad": grid.shape}
    found = run("sample_vjp", BACKWARD, inputs, outputs, init_value=0.0)
    truth = _truth(*(a.astype(np.float64) for a in (x, grid, cotangent)))
    for y, exact, rough in zip(found, truth, _truth(x, grid, cotangent), strict=True):
        assert_accurate(y, exact, rough.astype(np.float32))
