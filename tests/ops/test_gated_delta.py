"""gated_delta against float64: shapes of heads, gates of columns, masks, and the gradient."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops.gated_delta import gated_delta
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests.gpus import GPUS
from tests.numerics import assert_accurate, behind_one, random, round_to, to64


@pytest.fixture(params=["reference", "checked", *GPUS], autouse=True)
def path(request: pytest.FixtureRequest) -> Any:
    """The reference, the checked build of the host backend, and GPUs."""
    name = "host" if request.param == "checked" else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield name


def arrays(
    shape: tuple[int, ...], dtype: mx.Dtype, columns: bool = False, masked: bool = False
) -> list[Any]:
    """Arguments by batch, tokens, heads of keys and of values, and their widths."""
    batch, length, key_heads, heads, width, values = shape
    rng = np.random.default_rng(length)
    scale = width**-0.5
    q, k = (random(rng, (batch, length, key_heads, width), dtype, scale) for _ in range(2))
    gates = (batch, length, heads)
    g = mx.array(rng.uniform(0.5, 1, (*gates, width) if columns else gates), mx.float32)
    beta = round_to(rng.uniform(0, 1, gates), dtype)
    mask = mx.array(rng.uniform(size=(batch, length)) > 0.3) if masked else None
    v, state = random(rng, (*gates, values), dtype), random(rng, (batch, heads, values, width))
    return [q, k, v, g, beta, state, mask]


def by_numpy(dtype: Any, given: list[Any], absolute: bool = False) -> tuple[Any, Any]:
    """Token after token; or what the absolute terms of its sums add up to."""
    q, k, v, g, beta, S = (to64(a).astype(dtype) for a in given[:6])
    q, k, v, S = (abs(a) if absolute else a for a in (q, k, v, S))
    rows = []
    for t in range(v.shape[1]):
        key, query = (np.repeat(a[:, t], v.shape[2] // a.shape[2], 1)[..., None, :] for a in (k, q))
        gate = g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None]
        left = -1 if not absolute else 1
        change = v[:, t] + left * (S * gate * key).sum(-1)
        new = S * gate + key * (beta[:, t, :, None] * change)[..., None]
        rows.append((new * query).sum(-1))
        shown = True if given[6] is None else np.array(given[6])[:, t, None, None, None]
        S = np.where(shown, new, S)
    return np.stack(rows, 1), S


CASES = [
    ((2, 5, 2, 4, 32, 24), mx.float32, False, True),
    ((1, 4, 1, 2, 64, 3), mx.bfloat16, True, False),
    ((2, 1, 1, 1, 16, 8), mx.float16, True, True),
    ((1, 7, 2, 6, 128, 32), mx.bfloat16, False, False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Any, path: str) -> None:
    given = arrays(*case)
    with trace() as launches:
        found = gated_delta(*given)
    assert len(launches) == (path != "reference") and {run.backend for run in launches} <= {path}
    truth, rounded, terms = (
        by_numpy(np.float64, given),
        by_numpy(np.float32, given),
        by_numpy(np.float64, given, True),
    )
    for y, exact, near, sums in zip(found, truth, rounded, terms, strict=True):
        assert_accurate(y, exact, round_to(near, y.dtype), terms=sums, what=path)
    assert found[0].dtype == case[1] and found[1].dtype == mx.float32


@pytest.mark.parametrize(("case", "size"), [(CASES[0], 1.0), (CASES[3], 30.0)], ids=str)
def test_norms_of_queries_and_keys(case: Any, size: float, path: str) -> None:
    """Rows of any size, and small ones to which the epsilon counts."""
    given, norms = arrays(*case), (1e-3, 0.25, 0.5)
    given[0], given[1] = size * given[0], given[1] / size

    def normed(kind: Any) -> list[Any]:
        rows = [to64(x).astype(kind) for x in given[:2]]
        pairs = zip(rows, norms[1:], strict=True)
        means = [np.sqrt((x * x).mean(-1, keepdims=True) + kind(norms[0])) for x in rows]
        rows = [x / m * kind(f) for (x, f), m in zip(pairs, means, strict=True)]
        return [*rows, *given[2:]]

    found = gated_delta(*given, norms=norms)
    truth, rounded, terms = (
        by_numpy(np.float64, normed(np.float64)),
        by_numpy(np.float32, [round_to(x, case[1]) for x in normed(np.float32)[:2]] + given[2:]),
        by_numpy(np.float64, normed(np.float64), True),
    )
    for y, exact, near, sums in zip(found, truth, rounded, terms, strict=True):
        assert_accurate(y, exact, round_to(near, y.dtype), terms=sums, what=path)


def test_views_and_a_token_after_the_other() -> None:
    """As all at once, wherever the arrays begin."""
    given = arrays((1, 4, 2, 4, 32, 24), mx.float32)
    whole, last = gated_delta(*given)
    rows, state = [], given[5]
    for t in range(4):
        token = [behind_one(a[:, t : t + 1]) for a in given[:5]]
        y, state = gated_delta(*token, behind_one(state))
        rows.append(y)
    np.testing.assert_allclose(to64(mx.concatenate(rows, 1)), to64(whole), rtol=0, atol=1e-5)
    np.testing.assert_allclose(to64(state), to64(last), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2, 1, 1, 24, 8), (1, 0, 1, 1, 32, 8)], ids=str)
def test_what_the_kernel_does_not_take(shape: tuple[int, ...], path: str) -> None:
    if path != "reference":
        return
    with use_backend("auto"):
        explain(reset=True)
        given = arrays(shape, mx.float32)
        y, state = gated_delta(*given)
        assert y.shape == given[2].shape and state.shape == given[5].shape
        assert explain()[0].path == "reference"
