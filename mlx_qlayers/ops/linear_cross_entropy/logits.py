"""The losses of a block of logits, and their derivatives: kernels, and MLX's operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ...dispatch import Operation, Plan, choose
from ...metal.common.kernels import constants, without
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec

_FILE = Path("logits.metal")
LOSSES, SLOPES = Kernel("logits_losses", _FILE), Kernel("logits_slopes", _FILE)
# Threads of a threadgroup, and logits of which each computes the slopes.
_THREADS, _EACH = 256, 8


class Scoring(NamedTuple):
    """The options of a loss that its logits depend on."""

    softcap: float | None  # of the logits, or None
    smoothing: float  # of the targets
    vocabulary: int  # columns of all blocks


def losses(scoring: Scoring, y: mx.array, targets: mx.array, bias: Any) -> list[mx.array]:
    """Of each row the logarithm of its sum of exponentials, and its score; (R,) float32 each.

    ``y`` are products (R, C) in any dtype, ``targets`` (R,) int32 numbers of columns of the block,
    or outside of it, ``bias`` is (C,) float32 or None.
    """
    z, inside = _capped(scoring, y, bias), (targets >= 0) & (targets < y.shape[1])
    picked = mx.take_along_axis(z, mx.where(inside, targets, 0)[:, None], axis=1)[:, 0]
    score = (1 - scoring.smoothing) * mx.where(inside, picked, 0)
    if scoring.smoothing:
        score = score + scoring.smoothing / scoring.vocabulary * z.sum(axis=1)
    return [mx.logsumexp(z, axis=1), score]


def slopes(
    scoring: Scoring, dtype: mx.Dtype, y: mx.array, targets: mx.array, bias: Any, lse: mx.array
) -> list[mx.array]:
    """The derivatives (R, C) of the losses by logits without a bias or a cap, in a dtype.

    ``lse`` is (R,) float32, of all blocks; all else as of :func:`losses`.
    """
    z, at = _capped(scoring, y, bias), mx.arange(y.shape[1]) == targets[:, None]
    g = mx.exp(z - lse[:, None]) - mx.where(at, 1 - scoring.smoothing, 0.0)
    if scoring.smoothing:
        g = g - scoring.smoothing / scoring.vocabulary
    if scoring.softcap is not None:
        g = g * (1 - mx.square(z / scoring.softcap))
    return [g.astype(dtype)]


def _capped(scoring: Scoring, y: mx.array, bias: Any) -> mx.array:
    z = y.astype(mx.float32)
    if bias is not None:
        z = z + bias
    return z if scoring.softcap is None else scoring.softcap * mx.tanh(z / scoring.softcap)


def _bound(arrays: Sequence[Any], scoring: Scoring, dtype: mx.Dtype | None) -> Any:
    """The launch of a kernel: that of slopes in a dtype, or that of losses."""
    (y, targets, bias, *lse), (softcap, smoothing, vocabulary) = arrays, scoring
    rows, columns = y.shape
    options = mx.array([softcap or 1.0, 1 - smoothing, smoothing / vocabulary])
    shape, omitted = constants([columns]), ("bias",) * (bias is None)
    template: dict[str, Any] = {"T": y.dtype, "biased": bias is not None}
    template |= {"capped": softcap is not None, "smoothed": smoothing > 0}
    specs = [y, targets, *[bias] * (bias is not None), *lse]
    grid, outputs = (_THREADS * rows, 1, 1), [(rows,), (rows,)]
    if dtype is not None:
        groups = -(-columns // (_THREADS * _EACH))
        grid, outputs = (_THREADS * groups, rows, 1), [y.shape]
        template |= {"O": dtype}
    launch = without(LOSSES if dtype is None else SLOPES, omitted).bind(
        [*specs, Spec.of(options), Spec.of(shape)],
        template=template,
        grid=grid,
        threadgroup=(_THREADS, 1, 1),
        output_shapes=outputs,
    )
    return lambda *given: launch([*(a for a in given if a is not None), options, shape])


def _plan(arrays: Sequence[Any], dtype: mx.Dtype | None, *scoring: Any) -> Plan:
    options = Scoring(*scoring)
    by_operators = composed(options, dtype)
    choice = choose("linear_cross_entropy", by="a kernel of logits")
    if choice.path == "reference" or not arrays[0].size:
        return Plan(choice._replace(path="reference"), by_operators)
    return Plan(choice, _bound(arrays, options, dtype), (), by_operators)


def composed(scoring: Scoring, dtype: mx.Dtype | None) -> Any:
    """The losses, or the slopes in a dtype, in MLX's operators."""

    def run(*given: Any) -> list[mx.array]:
        if dtype is None:
            return losses(scoring, *given)
        return slopes(scoring, dtype, *given)

    return run


OF_LOGITS = Operation("linear_cross_entropy, of logits", _plan)
