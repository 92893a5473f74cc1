"""Random weights rounded by GPTQ, held against OBQ in float64."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlx_qlayers.formats import Format
from mlx_qlayers.ops.gptq import _TAKES, gptq
from tests.examples.arrays import DTYPES, dtype_of, laid_out
from tests.examples.calls import Call, Random, declared
from tests.examples.factors import KEPT
from tests.numerics import to64
from tests.packed import codes


def inputs_seen(
    n: int, k: int, batch: tuple[int, ...] = (), seed: int = 0
) -> tuple[mx.array, mx.array]:
    """Weights, and a Hessian of inputs that depend on each other."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*batch, 3 * k, k)) @ (rng.normal(size=(k, k)) * np.logspace(0, -1, k))
    w, h = rng.normal(size=(*batch, n, k)), x.swapaxes(-1, -2) @ x
    return mx.array(w.astype(np.float32)), mx.array(h.astype(np.float32))


def assert_nearest(
    w: np.ndarray, h: np.ndarray, found: list[np.ndarray], fmt: Format, act_order: bool
) -> None:
    """Every code is the nearest to what the columns before have left: OBQ in float64, by columns of
    the whole inverse, given the scales.
    """
    (scales, biases), q, k = (
        (np.repeat(a, fmt.group_size, axis=1) for a in found[:2]),
        found[2],
        len(h),
    )
    unseen = np.diag(h) == 0
    left, mean = np.where(unseen, 0, w), np.trace(h) / k
    order = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(k)
    inverse, near = np.linalg.inv(h + 0.01 * mean * np.eye(k)), 0
    for at in order:
        place = (left[:, at] - biases[:, at]) / scales[:, at]
        off = np.abs(q[:, at] - np.clip(place, 0, 2**fmt.bits - 1))
        assert (off <= 0.501).all(), f"error {off.max()} in column {at}"
        near += (off > 0.499).sum()
        error = left[:, at] - (q[:, at] * scales[:, at] + biases[:, at])
        left = left - np.outer(error, inverse[at]) / inverse[at, at]
        inverse = inverse - np.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    assert near <= 2 + 0.02 * q.size, f"error: {near} ties"


def _gptq(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    fmt, dtype = case.fmt, dtype_of(case.dtype)
    k = case.groups * fmt.group_size
    w, h = inputs_seen(case.n, k, case.batch, case.seed)
    if case.unseen:
        h[..., 0, :], h[..., :, 0] = 0, 0
    w = laid_out(w.astype(dtype), case.kept[0])

    def holds(found: list[mx.array]) -> None:
        *of, packed = found
        parts = *(to64(a) for a in of), codes(packed, fmt.bits)
        for number in np.ndindex(case.batch):
            each = [a[number] for a in parts]
            assert_nearest(to64(w)[number], to64(h)[number], each, fmt, case.act_order)

    def function(w: mx.array, hessian: mx.array) -> list[mx.array]:
        packed, *rest = gptq(w, hessian, fmt, act_order=case.act_order)
        return [*rest, packed]

    return Call(
        function,
        {"w": w, "hessian": h},
        {},
        (*case.batch, case.n, case.groups),
        lambda *_: ({}, {}),
        dtypes=[dtype, dtype, mx.uint32],
        holds=holds,
    )


GPTQ = Random(
    KEPT
    | {
        "fmt": [Format(size, bits) for size in (32, 64, 128) for bits in (4, 2, 3, 5, 6, 8)],
        "n": range(7, 0, -1),
        "groups": [1, 2, 3],
        "batch": [(), (2,)],
        "unseen": [False, True],
        "dtype": ("float32", DTYPES),
    }
    | declared(_TAKES),
    _gptq,
    [
        {"fmt": fmt, "groups": 192 // fmt.group_size, "dtype": "bfloat16", "act_order": act_order}
        for fmt in (Format(32, 3), Format(64, 4))
        for act_order in (False, True)
    ],
    examples=8,
)
