"""latent_attention against float64: rows that do not count, masks, splits, strides of queries."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops import latent_attention as latent
from mlx_qlayers.ops.latent_attention import latent_attention
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests.gpus import GPUS
from tests.numerics import (
    EPSILON,
    assert_accurate,
    random,
    round_to,
    to64,
)


@pytest.fixture(params=["reference", "checked", *GPUS], autouse=True)
def path(request: pytest.FixtureRequest) -> Any:
    """The reference, the checked build of the host backend, and GPUs."""
    name = "host" if request.param == "checked" else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield name


def arrays(shape: tuple[int, ...], dtype: mx.Dtype, masked: bool = False) -> list[Any]:
    """q, r, c, p and a mask, by batch, heads, rows and both widths; queries are parts of one."""
    batch, heads, rows, width, turned = shape
    rng = np.random.default_rng(rows)
    q, r = mx.split(random(rng, (batch, heads, 1, width + turned), dtype), [width], axis=-1)
    c, p = (random(rng, (batch, 1, rows, n), dtype) for n in (width, turned))
    mask = np.array(rng.uniform(size=(batch, 1, 1, rows)) > 0.4)
    mask[..., 0] = True
    return [q, r, c, p, mx.array(mask) if masked else None]


def by_numpy(dtype: Any, given: list[Any], last: int, scale: float) -> Any:
    q, r, c, p = (to64(a).astype(dtype) for a in given[:4])
    scores = (q @ c.swapaxes(-1, -2) + r @ p.swapaxes(-1, -2)) * dtype(scale)
    shown = np.arange(c.shape[2]) <= last
    scores = np.where(shown if given[4] is None else shown & np.array(given[4]), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ c


CASES = [
    ((1, 4, 20, 64, 32), mx.float32, 13, False),
    ((2, 3, 140, 64, 32), mx.bfloat16, 130, True),
    ((1, 6, 256, 128, 64), mx.float16, 40, False),
    ((2, 2, 9, 32, 32), mx.float32, 8, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Any, path: str) -> None:
    shape, dtype, last, masked = case
    given, scale = arrays(shape, dtype, masked), sum(shape[3:]) ** -0.5
    with trace() as launches:
        *four, mask = given
        y = latent_attention(*four, mx.array(last), scale=scale, mask=mask)
    assert len(launches) == (path != "reference") * (1 + (shape[2] >= 128))
    assert {run.backend for run in launches} <= {path} and y.dtype == dtype
    truth, rounded = (by_numpy(kind, given, last, scale) for kind in (np.float64, np.float32))
    # A weight is as exact as its score, of some units; the reference rounds both to the dtype.
    unit = EPSILON[dtype] / EPSILON[mx.float32] if path == "reference" else 1
    terms = 8 * np.abs(to64(given[2])).max() * unit
    assert_accurate(y, truth, round_to(rounded, dtype), terms=terms, what=path)


@pytest.mark.parametrize(
    "shape", [(1, 2, 9, 40, 32), (1, 2, 5, 32, 32), (1, 2, 9, 544, 32)], ids=str
)
def test_what_the_kernel_does_not_take(shape: tuple[int, ...], path: str) -> None:
    if path != "reference":
        return
    with use_backend("auto"):
        explain(reset=True)
        *four, _ = arrays(shape, mx.float32)
        assert latent_attention(*four, mx.array(3), scale=0.1).shape == four[0].shape
        assert explain()[0].path == "reference"


def test_long_caches_go_by_what_was_measured(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """So many rows for each sequence, on a GPU; on request the kernel takes more."""
    if path != "reference":
        return
    monkeypatch.setattr(latent, "threshold", lambda name: 8)
    with use_backend("auto"):
        for batch, rows, faster in ((1, 8, True), (1, 9, False), (3, 24, True), (3, 25, False)):
            q, r, c, _, _ = arrays((batch, 2, rows, 64, 32), mx.float32)
            reason = latent._choose(q, r, c).reason
            assert ("rows, more than 8 for each" not in reason) == faster, reason
