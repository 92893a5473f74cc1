"""Products with quantized matrices that each row chooses: checks, path and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import mlx.core as mx

from ..dispatch import Gradient, Operation, Plan, choose, dispatch
from ..dispatch.choice import unmeasured
from ..dispatch.measurements import Measurement, found
from ..formats import GLOBAL_UNIT, Format
from ..measurements.thresholds import gain
from ..metal.gather_qmm.gather_qmm import gather_qmm_config, gather_qmm_sorted
from ..metal.gather_qmm.gather_qmv import Pairs, Products, configuration, gather_qmv
from ..metal.quantized_matmul.gradients import scales_and_biases_gradient
from ..metal.quantized_matmul.qmm import QmmConfig
from ..metal.quantized_matmul.qmm_tensor import TensorConfig, tensor_config
from ..options import MatmulCall, PackedMatrix
from ..reference.gather_qmm import gather_qmm as reference
from ..runtime.backend import Context, current, requested
from ..runtime.devices import device_of
from ..runtime.proof import first_proven
from ..runtime.spec import Spec
from .quantized_route import STOCK_COMPILES
from .signature import Signature, check_packed
from .tensor_choice import TENSOR, by_tensors, in_turn, measured_beside

# x, w, scales, biases, lhs_indices, rhs_indices and global_scale, or their specs.
_Arrays = Sequence[Any]

_KINDS = ("plain", "transposed")
# The kernel of rows in order without tensor operations.
_TILES = "sorted rows"


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    *,
    sorted_indices: bool = False,
) -> mx.array:
    """Multiply blocks of rows with the quantized matrices that indices choose for them.

    Takes the arguments and gives the results of ``mx.gather_qmm``, rounded once from float32
    sums. A mixture of experts is this product: the matrices are the experts.

    Args:
        x: (..., M, K) in float32, float16 or bfloat16.
        w: (..., N, K * bits / 32) uint32, or (..., K, N * bits / 32) if not ``transpose``.
        scales: one a group along the last axis of the matrices; floating point (affine), or uint8
            holding E8M0 (mxfp4, mxfp8) or E4M3 (nvfp4).
        biases: one a group (affine), else None.
        lhs_indices: integers, which block of rows of ``x`` each product takes, counted through
            its leading dimensions. None stands for every block once, in their shape.
        rhs_indices: integers, which matrix each product takes, counted likewise. None stands
            for every matrix once. The two are broadcast. No index may be out of range.
        transpose: multiply with the transposes of the matrices.
        group_size: elements that share a scale; None stands for the mode's default (affine: 64).
        bits: bits an element; None stands for the mode's default (affine: 4).
        mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``.
        global_scale: one number for each matrix in mode nvfp4, as ``mx.quantize`` takes it.
        sorted_indices: says that ``rhs_indices`` are sorted, so that products with the same
            matrix can share what they read of it. The statement has to be true.

    Returns:
        (..., M, N) in the dtype of ``x`` (affine: that of ``x`` and ``scales`` promoted), with
        the leading dimensions of the indices.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> w, scales, biases = mx.quantize(mx.random.normal((8, 128, 256)))
        >>> chosen = mx.array([[0, 5], [2, 7], [5, 6]])
        >>> gather_qmm(mx.ones((3, 1, 1, 256)), w, scales, biases, rhs_indices=chosen).shape
        (3, 2, 1, 128)

    Source: ``mx.gather_qmm``.
    """
    arrays = x, w, scales, biases, lhs_indices, rhs_indices, global_scale
    return dispatch(_GATHER_QMM, arrays, (transpose, group_size, bits, mode, sorted_indices))


def _plan(
    arrays: _Arrays,
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    sorted_indices: bool,
) -> Plan:
    x, w, scales, biases, _, _, global_scale = arrays
    fmt, transpose = Format.checked(group_size, bits, mode), bool(transpose)
    sorted_indices = bool(sorted_indices)
    leading = _check(arrays, transpose, fmt)
    out = x.dtype if biases is None else mx.result_type(x.dtype, scales.dtype, biases.dtype)
    kind = scales.dtype if biases is None else mx.result_type(scales.dtype, biases.dtype)
    matrix, scaled = PackedMatrix(w, Spec(scales.shape, kind)), global_scale is not None
    call = MatmulCall(Spec(x.shape, out), matrix, transpose, fmt)
    stock = reference(call, leading, sorted_indices)
    rows = prod(leading) * x.shape[-2]
    empty = None if 0 not in (*leading, *x.shape, *w.shape) else "the product is empty"
    best: dict[str, Any] = {}
    reason = empty or _stock_is_better(rows, fmt.bits, transpose)
    if sorted_indices and not empty and not device_of().measured:
        best = measured_beside(_measured(call, rows), _TILES)
    choice = choose(
        "gather_qmm",
        not empty,
        reason=reason,
        host_gain=gain("gather_qmm_gain", rows, fmt.mode, fmt.bits, _KINDS[transpose]),
        **best,
    )
    if empty:  # MLX's operator divides by zero
        columns = w.shape[-2] if transpose else fmt.dims(w)
        shape = *leading, x.shape[-2], columns
        return Plan(choice, lambda *_: mx.zeros(shape, out))
    if choice.path == "reference":
        if current.get().invariant and device_of().gpu:
            raise ValueError(
                f"batch-invariant experts take no {x.shape} times {w.shape} ({choice.reason})"
            )
        return Plan(choice, stock)
    pairs = _pairs(arrays, leading, sorted_indices)
    of_x, *others = _gradients(choice.path, call, pairs)
    gradients = [of_x, *others[:1] * (biases is not None), *others[1:] * scaled]
    forward = _launch(choice.path, call, pairs, scaled)
    return Plan(choice, forward, gradients, stock)


@lru_cache(maxsize=1024)
def leaves_to_stock(context: Context, epoch: int, rows: int, bits: int, in_order: bool) -> bool:
    """Whether ``auto`` runs the stock operator for so many rows, on a GPU.

    For layers: a token takes a product of few rows from each, and to dispatch one takes Python
    longer than to call stock. Answers are kept for a context and an epoch.
    """
    measured = device_of().measured or not in_order  # else it may be measured here
    if requested() != "auto" or not measured or context.invariant:
        return False
    return _stock_is_better(rows, bits, True) is not None


def _measured(call: MatmulCall, rows: int) -> Measurement | None:
    """The measurement for so many sorted rows."""
    x, (w, *_), transpose, (group, bits, mode) = call
    if not transpose:
        return None
    sizes = rows, prod(w.shape[:-2]), w.shape[-2], x.shape[-1]
    return found("gather_qmm", sizes, x.dtype, (mode, group, bits))


def _stock_is_better(rows: int, bits: int, transpose: bool) -> str | None:
    """Why ``auto`` leaves the kernel for the stock operator on a GPU."""
    device = device_of()
    if bits < device.stock_least_bits:
        return None
    if device.stock_compiles and transpose and rows < STOCK_COMPILES:
        return "the stock operator and its call are as fast with so few rows"
    return unmeasured()


def _pairs(arrays: _Arrays, leading: tuple[int, ...], sorted_indices: bool) -> Pairs:
    x, w, _, _, left, right, _ = arrays
    share = 0 if left is not None else _repeats(x.shape[:-2], leading)
    # Indices that are repeated as a whole are not sorted any more.
    in_order = sorted_indices and _repeats(w.shape[:-2] if right is None else right.shape, leading)
    broadcast = any(a is not None and a.shape != leading for a in (left, right))
    every_left = _every(x, leading) if left is None and not share else None
    every_right = _every(w, leading) if right is None else None
    return Pairs(leading, share, bool(in_order), every_left, every_right, broadcast)


def _every(array: Spec, leading: tuple[int, ...]) -> mx.array:
    """All items of a batch in the shape of the products, evaluated: plans outlive their threads."""
    import numpy as np  # which the import of this package does not wait for

    batch = array.shape[:-2]
    every = np.arange(prod(batch), dtype=np.uint32).reshape(batch)
    return mx.array(np.broadcast_to(every, leading))


def _repeats(batch: tuple[int, ...], leading: tuple[int, ...]) -> int:
    """How often each item of a batch is repeated by broadcasting; 0 if it is not so simple."""
    padded = (1,) * (len(leading) - len(batch)) + tuple(batch)
    same = len(leading)
    while same and padded[same - 1] == 1:
        same -= 1
    return prod(leading[same:]) if padded[:same] == leading[:same] else 0


def _launch(path: str, call: MatmulCall, pairs: Pairs, scaled: bool = False) -> Products:
    (x, (w, *_), transpose, fmt), per_pair = call, call.x.shape[-2]
    rows, matrices = prod(pairs.shape) * per_pair, prod(w.shape[:-2])
    if current.get().invariant and device_of(path).gpu:
        pairs = pairs._replace(in_order=False)  # a product by itself, wherever it stands
    if pairs.in_order and device_of(path).gpu and rows >= matrices:
        cuts: dict[str, QmmConfig | TensorConfig] = {
            TENSOR: tensor_config(rows // matrices, x.shape[-1], x.dtype, fmt, transpose),
            _TILES: gather_qmm_config(rows, matrices, x.dtype, fmt),
        }
        best, kernels = None if device_of(path).measured else _measured(call, rows), [_TILES]
        if best is not None and by_tensors(best):
            kernels = in_turn(best, {"tensor": TENSOR, "kernel": _TILES})
        bind = partial(gather_qmm_sorted, call, pairs, scaled=scaled)
        return first_proven({each: partial(bind, config=cuts[each]) for each in kernels})
    config = configuration(path, per_pair, pairs.in_order, transpose, fmt)
    return gather_qmv(call, pairs, config, scaled)


def _gradients(path: str, call: MatmulCall, pairs: Pairs) -> tuple[Gradient, Gradient, Gradient]:
    """Those of x, of scales and biases together, and of global scales."""
    x, (w, *_), transpose, fmt = call
    m, dtype, matrices = x.shape[-2], x.dtype, prod(w.shape[:-2])

    def of_x(arrays: _Arrays, cotangents: list[mx.array], _: object) -> list[mx.array]:
        given, (dy,) = arrays[0], cotangents
        left, _ = pairs.lists(*arrays[4:6])
        if pairs.share != 1:  # terms are added up before they are rounded
            dy = dy.astype(mx.float32)
        back = dy, *arrays[1:4], None, *arrays[5:]
        terms = dispatch(_GATHER_QMM, back, (not transpose, *fmt, pairs.in_order))
        if left is not None:
            total = mx.zeros((prod(x.shape[:-2]), *x.shape[-2:]), mx.float32)
            terms = total.at[left].add(terms.reshape(-1, *x.shape[-2:]))
        elif pairs.share > 1:
            terms = terms.reshape(-1, pairs.share, *x.shape[-2:]).sum(1)
        return [terms.astype(given.dtype).reshape(x.shape)]

    @cache
    def scales_and_biases() -> Callable[..., list[mx.array]]:
        rows = Spec((prod(pairs.shape) * m,), mx.uint32)
        chosen = rows, rows, Spec((matrices + 1,), mx.uint32)
        dy = Spec((rows.size, w.shape[-2] if transpose else fmt.dims(w)), dtype)
        return scales_and_biases_gradient(call, dy, path, chosen)

    def of_scales_and_biases(
        arrays: _Arrays, cotangents: list[mx.array], _: object
    ) -> list[mx.array]:
        given, w, *packed = arrays[:4]
        left, right = pairs.lists(*arrays[4:6])
        chosen = _rows_by_matrix(left, right, pairs.share, matrices, m)
        found = scales_and_biases()(given.astype(dtype), cotangents[0].astype(dtype), w, *chosen)
        return [d.astype(a.dtype) for d, a in zip(found, packed, strict=True)]

    @cache
    def exact() -> Products:
        return _launch(path, call._replace(x=Spec(x.shape, mx.float32)), pairs)

    def of_global_scale(arrays: _Arrays, cotangents: list[mx.array], _: object) -> list[mx.array]:
        *given, factors = arrays
        y = exact()(*given, None) * cotangents[0].astype(mx.float32)
        each = y.sum((-2, -1)).flatten() / GLOBAL_UNIT
        total = mx.zeros((factors.size,)).at[pairs.lists(*arrays[4:6])[1]].add(each)
        return [total.reshape(factors.shape).astype(factors.dtype)]

    return (
        Gradient((0,), of_x),
        Gradient((2, 3), of_scales_and_biases),
        Gradient((6,), of_global_scale),
    )


def _rows_by_matrix(
    left: mx.array | None, right: mx.array, share: int, matrices: int, per_pair: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The rows of x and of the result that met each matrix, and where each matrix's begin."""
    order = mx.argsort(right)
    blocks = order // share if left is None else left[order]
    x_rows, y_rows = (
        (at[:, None] * per_pair + mx.arange(per_pair)).flatten().astype(mx.uint32)
        for at in (blocks, order)
    )
    counts = mx.zeros((matrices + 1,), mx.uint32).at[right + 1].add(per_pair)
    return x_rows, y_rows, mx.cumsum(counts).astype(mx.uint32)


_TAKES = Signature("""
    x: float (..., M, K)
    w: uint32 (..., N, W)
    lhs_indices: integer or None
    rhs_indices: integer or None
""")
_GATHER_QMM = Operation("gather_qmm", _plan, compiled=True)


def _check(arrays: _Arrays, transpose: bool, fmt: Format) -> tuple[int, ...]:
    """The leading dimensions of the result."""
    x, w, scales, biases, lhs_indices, rhs_indices, global_scale = arrays
    _TAKES.check(x, w, lhs_indices, rhs_indices)
    check_packed(x, w, scales, biases, transpose, fmt)
    if global_scale is not None and (
        problem := fmt.mismatch_of_global(global_scale, prod(w.shape[:-2]))
    ):
        raise ValueError(problem)
    left = x.shape[:-2] if lhs_indices is None else lhs_indices.shape
    right = w.shape[:-2] if rhs_indices is None else rhs_indices.shape
    for name, given, shape in (("x", lhs_indices, x.shape), ("w", rhs_indices, w.shape)):
        if 0 in shape[:-2] and given is not None and given.size:
            raise ValueError(f"{name} of shape {shape} has nothing to choose")
    try:
        return mx.broadcast_shapes(left, right)
    except ValueError:
        raise ValueError(
            f"lhs_indices and rhs_indices do not broadcast: shapes {left} and {right} "
            "(None stands for the leading dimensions of x or w)"
        ) from None
