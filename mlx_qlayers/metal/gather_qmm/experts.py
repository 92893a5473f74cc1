"""Launches the kernels of a mixture of experts for few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import mlx.core as mx

from ...formats import Format
from ...measurements.thresholds import tabled
from ...options import SCORES, Clipped, PackedMatrix, Router
from ...runtime.devices import device_of
from ...runtime.devices.record import most_threads
from ...runtime.spec import Spec
from ..common.kernels import constants, large_kernel, without, words
from ..quantized_matmul.qmv import GATES
from ..quantized_matmul.tile import packed_template, whole_words

# Rows of both matrices, or of one, that a SIMD group takes.
_OUTPUTS = 4
# Products of an expert that it takes at once, and those rows: the first that registers suffice for.
_TAKEN = (4, _OUTPUTS), (4, _OUTPUTS // 2), (1, _OUTPUTS)
# The most SIMD groups that share the products of a row.
_SIMDS = 8
_THREADS = 64
_MATRIX = ("w", "scales", "biases", "bias")
_DEFERRED = "squares", "epsilon"
_INPUTS = ("x", "right", *_MATRIX, *(f"{name}1" for name in _MATRIX), *_DEFERRED, "shape")

# Of the arrays that there are.
Launch = Callable[[Sequence[mx.array]], list[mx.array]]


def _registers(*, rows: int, outputs: int, run: int, **_: Any) -> int:
    return (rows > 1) * outputs * run + 2 * run + rows * 7


PRODUCTS = large_kernel("experts_products", "gather_qmm/experts.metal", registers=_registers)
COMBINED = large_kernel(
    "experts_combined",
    "gather_qmm/experts.metal",
    threadgroup_memory=lambda outputs, simds, **_: 4 * outputs * simds,
    registers=lambda outputs, run, **_: 2 * run + 4 * outputs,
)
CHOSEN = large_kernel(
    "experts_chosen",
    "gather_qmm/experts_chosen.metal",
    registers=lambda per, groups, **_: (2 + (groups > 1)) * per + 12,
)


def share_experts(right: Sequence[int], experts: int) -> bool:
    """Whether products of rows that chose experts, (..., J), share matrices often enough."""
    least = tabled("experts_shared", device=None if device_of().gpu else "host")
    return prod(right) > right[-1] and prod(right) >= least * experts


def _taken(shared: bool, fmt: Format) -> tuple[int, int]:
    """Products of an expert that a SIMD group takes at once, and how many rows of its matrices."""
    few, run = device_of().few_registers, whole_words(fmt)
    return next(
        (rows, outputs)
        for rows, outputs in _TAKEN[0 if shared else 2 :]
        if not few or most_threads(_registers(rows=rows, outputs=outputs, run=run)) >= _THREADS
    )


def experts_products(
    x: Any,
    right: Any,
    matrices: Sequence[PackedMatrix],
    fmt: Format,
    gate: str | Clipped | None,
    share: int,
    squares: Any = None,
    epsilon: float = 0.0,
) -> Launch:
    """Binds the products of rows (..., K) with one or two matrices of the experts that they chose.

    ``right`` has P experts, and product p takes row p / ``share``. ``squares`` and ``epsilon`` are
    those of a deferred RMS norm. The launch gives (..., N) for each matrix, or the gated product.
    """
    names = dict(zip(_INPUTS, (x, right, *(a for m in matrices for a in m)), strict=False))
    number = constants([epsilon], mx.float32)
    names |= {} if squares is None else {"squares": squares, "epsilon": Spec.of(number)}
    given = {name: spec for name, spec in names.items() if spec is not None}
    pair = len(matrices) == 2
    omitted = [name for name in _INPUTS[:-1] if name not in given]
    omitted += ["y1"] * (gate is not None or not pair)
    n, k, products = matrices[0].w.shape[1], x.shape[-1], prod(right.shape)
    rows, outputs = _taken(share_experts(right.shape, matrices[0].w.shape[0]), fmt)
    height = outputs // 2 if pair else outputs
    clipped = words(*gate) if isinstance(gate, Clipped) else ()
    sizes = mx.array([products, n, k, share, *clipped], mx.int32)
    launch = without(PRODUCTS, tuple(omitted)).bind(
        [*given.values(), sizes],
        template=packed_template(fmt, x.dtype, matrices[0].scales.dtype)
        | {
            "gate": len(GATES) if isinstance(gate, Clipped) else GATES.index(gate),
            "rows": rows,
            "outputs": outputs,
            "height": height,
            "run": whole_words(fmt),
        },
        grid=(-(-n // height * 32 // _THREADS) * _THREADS, products, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*right.shape, n)] * (2 if pair and gate is None else 1),
    )
    behind = [sizes] if squares is None else [number, sizes]
    return lambda arrays: launch([*arrays, *behind])


def experts_combined(
    x: Any, right: Any, scores: Any, matrix: PackedMatrix, residual: Any, fmt: Format
) -> Launch:
    """Binds the sums by ``scores`` (..., J) of products of rows (..., J, K) with experts."""
    arrays = x, right, scores, *matrix, residual
    names = dict(zip(COMBINED.program.input_names, arrays, strict=False))
    given = {name: spec for name, spec in names.items() if spec is not None}
    (*leading, share), n = right.shape, matrix.w.shape[1]
    rows = prod(leading)
    sizes = mx.array([rows * share, n, x.shape[-1], share], mx.int32)
    simds = -(-share // -(-share // _SIMDS))
    launch = without(COMBINED, tuple(name for name in names if name not in given)).bind(
        [*given.values(), sizes],
        template=packed_template(fmt, x.dtype, matrix.scales.dtype)
        | {"W": scores.dtype, "outputs": _OUTPUTS, "run": whole_words(fmt), "simds": simds},
        grid=(-(-n // _OUTPUTS) * 32 * simds, rows, 1),
        threadgroup=(32 * simds, 1, 1),
        output_shapes=[(*leading, n)],
    )
    return lambda arrays: launch([*arrays, sizes])


def experts_chosen(logits: Any, bias: Any, factors: Any, router: Router) -> Launch:
    """Binds the router: from logits (..., E) to experts and weights (..., J), J at most 32."""
    *leading, experts = logits.shape
    given = {"logits": logits, "bias": bias, "factors": factors}
    if router.score == "logits":  # whose weights are a softmax
        router = router._replace(epsilon=0.0, floor=0.0)
    numbers = mx.array([router.fill, router.epsilon, router.floor, router.scale], mx.float32)
    grouped = router.groups > 1 and router.dropped > 0
    omitted = tuple(name for name, spec in given.items() if spec is None)
    name = f"experts_chosen_{len(omitted)}{omitted[0] if omitted else ''}"
    launch = without(CHOSEN, omitted, name).bind(
        [*(spec for spec in given.values() if spec is not None), numbers],
        template={
            "T": logits.dtype,
            "B": logits.dtype if bias is None else bias.dtype,
            "F": logits.dtype if factors is None else factors.dtype,
            "W": router.dtype,
            "per": -(-experts // 32),
            "J": router.top_k,
            "score": SCORES.index(router.score),
            "groups": router.groups if grouped else 1,
            "dropped": router.dropped if grouped else 0,
            "pairs": router.pairs and grouped,
            "masked": router.masked and grouped,
            "last": router.last,
            "normed": router.normed,
        },
        grid=(32, prod(leading), 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(*leading, router.top_k)] * 2,
    )
    return lambda arrays: launch([*arrays, numbers])
