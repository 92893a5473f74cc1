"""The checked build's arithmetic is as inexact as hardware may be, where a kernel must bear it."""

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers.runtime import Kernel, use_backend
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.source import METAL, OPERATIONS, head, read

PATHS = sorted(path for room in (METAL, OPERATIONS) for path in room.rglob("*.metal"))
TEXT = """
#include <metal_stdlib>
using namespace metal;
[[kernel]] void rough(
    const device float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float4 four = fast::NAME(float4(x[i]));
  y[i] = four.z == fast::NAME(x[i]) ? four.z : NAN;
}
"""
X = np.random.default_rng(0).uniform(0.1, 3, 512).astype(np.float32)
# The function, its value, and its largest error as a function of x: in units in the last place of
# the result, or where that is None an absolute one.
FUNCTIONS = [
    ("exp", np.exp, lambda x: 3 + np.floor(2 * x), None),
    ("exp2", np.exp2, lambda x: 3 + np.floor(2 * x), None),
    (
        "log",
        np.log,
        lambda x: 3 * (abs(x - 1.25) > 0.75),
        lambda x: 2.0**-21 * (abs(x - 1.25) < 0.75),
    ),
    ("sin", np.sin, None, lambda x: np.full_like(x, 2.0**-13)),
    ("cos", np.cos, None, lambda x: np.full_like(x, 2.0**-13)),
    ("sqrt", np.sqrt, lambda x: np.full_like(x, 3), None),
    ("rsqrt", lambda x: x**-0.5, lambda x: np.full_like(x, 2), None),
]
# Functions in two precisions: without fast:: or precise:: it depends on the version of macOS.
TWO_PRECISIONS = re.compile(
    r"(?<!fast::)(?<!precise::)(?<![\w.])(?:metal::)?"
    r"\b(?:a?(?:cos|sin|tan)h?|atan2|(?:cos|sin|tan)pi|sincos|exp(?:2|10)?|log(?:2|10)?|powr?|r?sqrt"
    r"|divide|fmod)\s*\("
)


def rough(name: str, checked: bool) -> np.ndarray:
    kernel = Kernel("rough", TEXT.replace("NAME", name), ("x",), ("y",))
    launch = {"grid": (512, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(512,)]}
    with use_backend("host"), checks(checked):
        (y,) = kernel([mx.array(X)], **launch)
    return np.array(y, np.float64)


@pytest.mark.parametrize(("name", "function", "ulps", "absolute"), FUNCTIONS)
def test_errors_are_the_documented_ones(name, function, ulps, absolute):
    truth = function(X.astype(np.float64))
    unit = np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64)
    allowed = (ulps(X) * unit if ulps else 0) + (absolute(X) if absolute else 0)
    error = np.abs(rough(name, True) - truth)
    # The function below is within one unit of the truth, itself rounded.
    assert (error <= allowed + 1.5 * unit).all()
    assert (error >= 0.9 * allowed - 1.5 * unit).all()
    assert (np.abs(rough(name, False) - truth) <= 1.5 * unit).all()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_kernels_name_the_precision(path):
    text = re.sub(r"//[^\n]*", "", path.read_text())
    assert TWO_PRECISIONS.findall(text) == []


# With all helpers inline, 3D and bicubic sampling compile for a minute.
SAMPLING = ("grid_sample", "deformable")
INLINE = [path for path in PATHS if path.parent.name not in SAMPLING]


@pytest.mark.parametrize("path", INLINE, ids=lambda path: path.stem)
def test_helpers_with_arrays_are_forced_inline(path):
    """Else Apple's compiler may keep the arrays on the stack."""
    helpers = [item for item in read(path) if not item.kernel and "(" in head(item.tokens)]
    texts = ({token.text for token in item.tokens} for item in helpers)
    held = [words for words in texts if words & {"thread", "["} and "constexpr" not in words]
    assert all("METAL_FUNC" in words or "struct" in words for words in held)


PRODUCT = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
[[kernel]] void product(
    const device half* x, device float* y, uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<half, 8, 8> left, right(half(1));
  simdgroup_load(left, x, 8);
  simdgroup_matrix<float, 8, 8> sum(0.0f);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, y + lane / 32, 8);
}
"""


@pytest.mark.parametrize("flush", [False, True])
def test_subnormal_halves_in_matrix_products(flush):
    x = np.linspace(-2, 2, 64, dtype=np.float32).reshape(8, 8) * 2.0**-14
    x = x.astype(np.float16)
    kernel = Kernel("product", PRODUCT, ("x",), ("y",))
    launch = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(8, 8)]}
    with use_backend("host"), checks(flush_subnormals=flush):
        (y,) = kernel([mx.array(x)], **launch)
    kept = np.where(np.abs(x) < 2.0**-14, 0, x) if flush else x
    assert (np.array(y) == kept).all()
