"""A mixture of experts for few rows: products with the matrices that rows chose, and their sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx

from ..dispatch import Choice, Operation, Plan, dispatch, either
from ..dispatch.choice import choose_measured
from ..formats import Format
from ..metal.gather_qmm import experts as kernels
from ..options import SCORES, Clipped, PackedMatrix, Router
from ..reference import experts as reference
from ..runtime.backend import requested
from ..runtime.launch import Launching
from ..runtime.spec import Spec
from .fused_products import ACTIVATIONS, normed, with_squares
from .gather_qmm import gather_qmm
from .signature import Signature, check_packed

_FORMAT = Format(64, 4)
_INDICES = partial(Spec, dtype=mx.uint32)
# Experts that a SIMD group chooses for a row, and chooses from.
_MAX_CHOSEN, _MAX_EXPERTS = 32, 1024


def experts_products(
    x: mx.array,
    experts: mx.array,
    matrices: Sequence[PackedMatrix],
    fmt: Format = _FORMAT,
    gate: str | Clipped | None = None,
    norm: tuple[mx.array, float] | None = None,
) -> list[mx.array]:
    """Products of few rows with one or two matrices of each of the experts that they chose.

    Args:
        x: (..., K) in float32, float16 or bfloat16, or (..., J, K): a row for each choice.
        experts: (..., J) integers: the J experts of each row. None may be out of range.
        matrices: each ``(w, scales, biases, bias)``: (E, N, K) packed in one format, and (E, N).
        fmt: the format of the matrices.
        gate: with two matrices: give ``activation(first) * second`` alone; the activation is
            ``"silu"``, ``"gelu"`` or ``"gelu_approx"``. Or what is made of both, ``Clipped``.
        norm: the ``partial_squares`` of rows ``x`` that were multiplied by the weight of an RMS
            norm, as :func:`~mlx_qlayers.ops.fused_products.fused_products` takes them, and its
            epsilon; None where ``x`` has no deferred norm.

    Returns:
        (..., J, N) for each matrix, or one gated product; float32 sums rounded once.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> w = PackedMatrix(*mx.quantize(mx.random.normal((8, 128, 64))))
        >>> [y.shape for y in experts_products(mx.ones((1, 64)), mx.array([[5, 2]]), [w])]
        [(1, 2, 128)]

    Source: ``mx.gather_qmm``.
    """
    flat = [array for matrix in matrices for array in PackedMatrix(*matrix)]
    squares, epsilon = norm or (None, 0.0)
    arrays = x, experts, squares, *flat
    return dispatch(EXPERTS_PRODUCTS, arrays, (fmt, gate, epsilon))


def experts_combined(
    x: mx.array,
    experts: mx.array,
    scores: mx.array,
    matrix: PackedMatrix,
    fmt: Format = _FORMAT,
    residual: mx.array | None = None,
) -> mx.array:
    """The sum, by scores, of products with a matrix of each of the experts that rows chose.

    Args:
        x: (..., J, K) in float32, float16 or bfloat16: a row for each choice.
        experts: (..., J) integers.
        scores: (..., J), floating point.
        matrix: ``(w, scales, biases, bias)``: (E, N, K) packed, and (E, N).
        fmt: the format of the matrices.
        residual: (..., N) in the dtype of ``x``, added to the sum; or None.

    Returns:
        (..., N) in the dtype of ``x``, rounded once.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> w = PackedMatrix(*mx.quantize(mx.random.normal((8, 128, 64))))
        >>> chosen, scores = mx.array([[5, 2]]), mx.array([[0.5, 0.5]])
        >>> experts_combined(mx.ones((1, 2, 64)), chosen, scores, w).shape
        (1, 128)

    Source: ``mx.gather_qmm``.
    """
    arrays = (x, experts, scores, *PackedMatrix(*matrix), residual)
    return dispatch(EXPERTS_COMBINED, arrays, (fmt,))[0]


def experts_chosen(
    logits: mx.array, router: Router, bias: mx.array | None = None, factors: mx.array | None = None
) -> list[mx.array]:
    """The experts that rows choose by their logits, the largest first, and their weights.

    Equal numbers are chosen from as ``mx.argpartition`` does it on GPUs, where it sorts. Those that
    are not a number are chosen last, or first where ``router.last``.

    Args:
        logits: (..., E) in float32, float16 or bfloat16.
        router: how they are chosen, and what their weights are.
        bias: (E,), floating point: what is added to scores for the choice alone.
        factors: (E,), floating point: what the weight of an expert is multiplied with.

    Returns:
        Experts, uint32, and weights, (..., J).

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> logits = mx.array([[0.0, 2.0, 1.0]])
        >>> experts_chosen(logits, Router(top_k=2))[0].tolist()
        [[1, 2]]

    Source: the routers of mlx-lm's models; of groups, DeepSeek-V3 (https://arxiv.org/abs/2412.19437).
    """
    return dispatch(EXPERTS_CHOSEN, (logits, bias, factors), (router,))


def _plan_chosen(arrays: Sequence[Any], router: Router) -> Plan:
    logits, bias, factors = arrays
    experts = _LOGITS.check(logits, bias, factors)["E"]
    _check_router(router, experts)
    if router.score in ("logits", "sparsemixer") and bias is not None:
        raise ValueError(f'bias goes with scores, not with score "{router.score}"')
    composed = partial(reference.experts_chosen, router=router)
    few = router.top_k <= _MAX_CHOSEN and router.groups <= _MAX_CHOSEN
    fits = few and logits.size and experts <= _MAX_EXPERTS
    sizes = logits.size // experts, experts
    form = router, bias is not None, factors is not None
    key = "router", sizes, logits.dtype, form
    choice = choose_measured("experts_chosen", fits, *key)

    def bind() -> Launching:
        launch = kernels.experts_chosen(logits, bias, factors, router)
        return Launching(launch, [i for i, a in enumerate(arrays) if a is not None])

    return either(choice, composed, arrays, bind)


def _check_router(router: Any, experts: int) -> None:
    if not isinstance(router, Router):
        raise ValueError(f"router must be a Router, not {router!r}")
    if not 0 < router.top_k <= experts:
        raise ValueError(f"top_k must be 1 to the {experts} experts, not {router.top_k}")
    if router.score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, not {router.score!r}")
    if router.score == "logits" and not (router.normed and router.groups == 1):
        raise ValueError('score "logits" must be normed, and without groups')
    if router.score == "sparsemixer" and (router.normed or router.groups > 1):
        raise ValueError('score "sparsemixer" must not be normed, and without groups')
    if router.groups < 1 or experts % router.groups:
        raise ValueError(f"groups must divide the {experts} experts, not {router.groups}")
    if not 0 <= router.dropped < router.groups:
        raise ValueError(f"dropped must be below the {router.groups} groups, not {router.dropped}")


def _plan_products(
    arrays: Sequence[Any], fmt: Format, gate: str | Clipped | None, epsilon: float
) -> Plan:
    fmt, (x, experts, squares, *flat) = Format.checked(*fmt), arrays
    matrices = [PackedMatrix(*flat[i : i + 4]) for i in range(0, len(flat), 4)]
    _check(x, experts, matrices, fmt)
    is_one = isinstance(gate, Clipped) or gate in ACTIVATIONS
    if gate is not None and (not is_one or len(matrices) != 2):
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"gate must be one of {names} or Clipped, with two matrices")
    if len(matrices) > 2 or matrices[0].w.shape != matrices[-1].w.shape:
        raise ValueError("matrices must be one or two of one shape")
    tiles = Spec((prod(x.shape[:-1]), -(-x.shape[-1] // 16)), mx.float32)
    if squares is not None and (squares != tiles or x.ndim > experts.ndim):
        raise ValueError(f"norm must have partial_squares {tiles}, not {squares}, of {x.shape}")

    def composed(*arrays: Any) -> list[mx.array]:
        x, experts, squares, *flat = arrays
        if squares is not None:
            x = normed(x, None, epsilon, squares)
        products = [
            _product(x, experts, PackedMatrix(*flat[i : i + 4]), fmt)
            for i in range(0, len(flat), 4)
        ]
        return products if gate is None else [gated(gate, *products)]

    kind = "gate" if gate else "pair" if len(matrices) > 1 else "one"
    kind = "each" if x.ndim > experts.ndim else kind
    choice = _choice("experts_products", x, experts, matrices, fmt, kind)
    share = 1 if x.ndim > experts.ndim else experts.shape[-1]
    given = x, _INDICES(experts.shape), matrices, fmt, gate, share, squares, epsilon
    order = 0, 1, *range(3, len(arrays)), 2
    bind = partial(_bound, kernels.experts_products, given, arrays, order)
    return either(choice, composed, arrays, bind)


def _plan_combined(arrays: Sequence[Any], fmt: Format) -> Plan:
    fmt, (x, experts, scores, *flat, residual) = Format.checked(*fmt), arrays
    matrix = PackedMatrix(*flat)
    _check(x, experts, [matrix], fmt)
    _SUMMED.check(experts, x, scores, residual, M=matrix.w.shape[1])

    def composed(*arrays: Any) -> list[mx.array]:
        x, experts, scores, *flat, residual = arrays
        y = _product(x, experts, PackedMatrix(*flat), fmt)
        total = (y * scores[..., None]).sum(axis=-2).astype(x.dtype)
        return [total if residual is None else residual + total]

    choice = _choice("experts_combined", x, experts, [matrix], fmt, "sum")
    given = x, _INDICES(experts.shape), scores, matrix, residual, fmt
    bind = partial(_bound, kernels.experts_combined, given, arrays, range(len(arrays)))
    return either(choice, composed, arrays, bind)


def _bound(bind: Any, given: Sequence[Any], arrays: Sequence[Any], order: Iterable[int]) -> Any:
    """A launch of the arrays that there are in another order, with indices as kernels take them."""
    run = Launching(bind(*given), [i for i in order if arrays[i] is not None])
    if arrays[1].dtype == mx.uint32:
        return run
    return lambda x, experts, *rest: run(x, experts.astype(mx.uint32), *rest)


def gated(gate: str | Clipped, y: mx.array, up: mx.array) -> mx.array:
    """The gated activation of the products with two matrices."""
    if isinstance(gate, str):
        return ACTIVATIONS[gate](y) * up
    y, up = mx.minimum(y, gate.limit), mx.clip(up, -gate.limit, gate.limit)
    return (up + gate.shift) * (y * mx.sigmoid(gate.alpha * y))


def _apart(arrays: list[Any], router: Router) -> list[Any]:
    """Logits of which no two are the same, whatever they are rounded to."""
    logits, *rest = arrays
    ranks = mx.argsort(mx.argsort(logits, axis=-1), axis=-1).astype(mx.int32)
    return [((ranks - logits.shape[-1] // 2) / 32).astype(logits.dtype), *rest]


_LOGITS = Signature("""
    logits: float (..., E)
    bias: float (E,) or None
    factors: float (E,) or None
""")
_ROWS = Signature("""
    experts: integer (*N, J)
    x: float (*N, K) or (*N, J, K)
""")
_MATRIX = Signature("matrices: uint32 (E, N, W)\nbias: any (E, N) or None")
_SUMMED = Signature("""
    experts: integer (*N, J)
    x: float (*N, J, K)
    scores: float (*N, J)
    residual: x (*N, M) or None
""")
EXPERTS_PRODUCTS = Operation("experts_products", _plan_products, sample=with_squares)
EXPERTS_CHOSEN = Operation("experts_chosen", _plan_chosen, sample=_apart)
EXPERTS_COMBINED = Operation("experts_combined", _plan_combined)


def _product(x: mx.array, experts: mx.array, matrix: PackedMatrix, fmt: Format) -> mx.array:
    rows = x[..., None, None, :] if x.ndim == experts.ndim else x[..., None, :]
    y = gather_qmm(rows, *matrix[:3], None, experts, True, *fmt).squeeze(-2)
    return y if matrix.bias is None else y + matrix.bias[experts]


def _choice(
    op: str, x: Any, experts: Any, matrices: Sequence[PackedMatrix], fmt: Format, kind: str
) -> Choice:
    arrays = [a for m in matrices for a in m[1:] if a is not None and a.dtype != mx.uint8]
    (count, n, _), each = matrices[0].w.shape, experts.shape[-1]
    lacking = 0 in (x.size, *matrices[0].w.shape) or {a.dtype for a in arrays} - {x.dtype}
    sizes = prod(experts.shape[:-1]), count, each, n, x.shape[-1]
    key = "experts", sizes, x.dtype, (fmt.mode, fmt.group_size, fmt.bits, kind)
    return choose_measured(op, not lacking, *key)


def leaves_experts(x: mx.array, experts: mx.array, matrix: PackedMatrix, fmt: Format) -> bool:
    """Whether ``auto`` leaves products of a row for each expert to stock operators."""
    choice = _choice("experts_products", x, experts, [matrix], fmt, "each")
    return requested() == "auto" and choice.path == "reference"


def _check(x: Any, experts: Any, matrices: Sequence[PackedMatrix], fmt: Format) -> None:
    _ROWS.check(experts, x)
    for w, scales, biases, bias in matrices:
        _MATRIX.check(w, bias)
        check_packed(x, w, scales, biases, True, fmt, "matrices: ")
