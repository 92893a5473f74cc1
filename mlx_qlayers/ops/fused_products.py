"""Products of one input with several quantized matrices, and what stands around them, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..dispatch import Choice, Operation, Plan, choose, dispatch, either
from ..dispatch.measurements import configure, found
from ..formats import Format
from ..measurements.thresholds import threshold
from ..metal.quantized_matmul.dequantize import RUN, dequantize, gated_rows
from ..metal.quantized_matmul.qmm_skinny import MAX_SKINNY_ROWS
from ..metal.quantized_matmul.qmm_tensor import tensor_product
from ..metal.quantized_matmul.qmv import MAX_MATRICES, Gate, QmvArrays, qmv, takes_deferred_norm
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS
from ..options import MatmulCall, PackedMatrix
from ..runtime.backend import backend, current
from ..runtime.devices import device_of
from ..runtime.proof import first_proven
from ..runtime.spec import Spec
from .quantized_matmul import quantized_matmul
from .quantized_route import (
    DENSE,
    QMV,
    SKINNY,
    dense_is_worse,
    host_gain,
    in_fixed_order,
    in_one_launch,
    is_skinny,
    skinny_spread,
    stock_is_better,
)
from .signature import Signature, check_packed
from .swiglu import swiglu
from .tensor_choice import CODES, PATHS, by_tensors, in_turn, takes_tensors

Norm = tuple[mx.array | None, float]

_Run = Callable[..., list[mx.array]]
# Of rows, the residual or None, and the arrays of all matrices.
_Multiply = Callable[[mx.array, mx.array | None, list[Any]], list[mx.array]]
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_approx": nn.gelu_approx,
}


def fused_products(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    norm: Norm | None = None,
    gate: Gate | None = None,
    residual: mx.array | None = None,
    partial_squares: mx.array | None = None,
    deferred_weight: mx.array | None = None,
) -> list[mx.array]:
    """Multiply one input with quantized matrices of one format: ``x @ w.T + bias`` for each.

    A kernel does all of it in one launch where the rows are few, rounding the results once. With
    tensor cores many rows are one dense product with all matrices, unpacked in one launch; else it
    is composed of single operations. The values are theirs up to rounding, the gradient too.

    Args:
        x: (..., K) in float32, float16 or bfloat16.
        matrices: each ``(w, scales, biases, bias)`` as in :func:`quantized_matmul`.
        group_size: elements that share a scale; None stands for the mode's default.
        bits: bits an element; None stands for the mode's default.
        mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``.
        norm: weight (K,) or None, and epsilon, of the RMS norm that ``x`` goes through first.
        gate: with two matrices: give ``activation(first) * second`` alone; the activation is
            ``"silu"``, ``"gelu"`` or ``"gelu_approx"``.
        residual: added to the product with a single matrix; not together with ``gate``.
        partial_squares: (M, ceil(K / 16)) float32, with a norm without weight for an ``x`` that was
            multiplied by the weight already: sums of squares of 16 columns of what it was before.
        deferred_weight: (N,) with a single matrix and no gate: the weight of an RMS norm that
            the result goes through next. The norm's factor is left to the product that follows.

    Returns:
        (..., N) for each matrix, or one gated product. With ``deferred_weight`` also
        the result times it, and ``partial_squares`` of the result.

    Raises:
        ValueError: there is no matrix, ``gate`` does not have two of one shape, ``residual`` does
            not have the shape of a single product, or a matrix does not fit ``x``.

    Example:
        >>> w = [mx.quantize(mx.random.normal((n, 64)), group_size=64, bits=4) for n in (64, 32)]
        >>> [y.shape for y in fused_products(mx.ones((1, 64)), [PackedMatrix(*m) for m in w])]
        [(1, 64), (1, 32)]

    Source:
        ``mx.quantized_matmul``, ``mx.fast.rms_norm``; gated units, arXiv 2002.05202.
    """
    weight, epsilon = (None, None) if norm is None else norm
    flat = [*chain.from_iterable(matrices)]
    if len(flat) != 4 * len(matrices):
        flat = [array for matrix in matrices for array in PackedMatrix(*matrix)]
    arrays = (x, weight, partial_squares, residual, deferred_weight, *flat)
    return dispatch(FUSED_PRODUCTS, arrays, (group_size, bits, mode, epsilon, gate))


def defers_norm(x: mx.array | Spec) -> bool:
    """Whether the norms between products of such rows should be deferred, to save their launches.

    In float16 a number times a weight may be out of range.
    """
    defers = bool(threshold("defers_norm", device=backend()))
    return defers and in_one_launch(x) and x.dtype == mx.bfloat16


def _plan(
    arrays: Sequence[Any],
    group_size: int | None,
    bits: int | None,
    mode: str,
    epsilon: float | None,
    gate: Gate | None,
) -> Plan:
    fmt = Format.checked(group_size, bits, mode)
    x, weight, partial_squares, residual, deferred_weight, *flat = arrays
    matrices = [PackedMatrix(*flat[i : i + 4]) for i in range(0, len(flat), 4)]
    _check(arrays[:5], matrices, fmt, epsilon, gate)
    composed = _composed(_one_by_one(fmt), epsilon, gate)
    rows, n, k = prod(x.shape[:-1]), sum(m.w.shape[0] for m in matrices), x.shape[-1]
    lacking = _lacking(x, rows, matrices, [weight, residual, deferred_weight])
    plain = epsilon is deferred_weight is None and gate in (None, "silu")
    if plain and current.get().invariant and device_of().gpu:
        choice = choose("fused_products", by=SKINNY)
        few = not lacking and rows <= MAX_SKINNY_ROWS
        order = in_fixed_order(choice.path, x, matrices, fmt) if few else None
        if order is None:
            return Plan(None, composed)
        launch = partial(qmv, QmvArrays.of(arrays), fmt, order, gate=gate, rounds=True)
        return either(choice, composed, arrays, launch)
    made = None if lacking else _by_tensors(x, matrices, residual, fmt, gate)
    if made is not None:
        choice, multiply = made
        return either(choice, composed, arrays, partial(_composed, multiply, epsilon, None))
    kind = _kind(matrices, epsilon is not None and partial_squares is None, gate, residual)
    # More rows are one dense product.
    kernel, best = QMV if rows <= MAX_QMV_ROWS else DENSE, None
    if kernel == QMV and not lacking:
        best = found("qmv", rows, n, k, x.dtype, fmt, kind)
    if best is None and is_skinny(x, matrices):
        kernel = SKINNY
    reason = lacking or (
        dense_is_worse(rows, n, x, fmt)
        if kernel == DENSE
        else stock_is_better(x.dtype, fmt, kernel == SKINNY)
    )
    choice = choose(
        "fused_products",
        not lacking,
        reason=reason,
        host_gain=host_gain(rows, fmt) if kernel == QMV else None,
        by=kernel,
        best=... if kernel == DENSE else best,
    )

    def bind() -> _Run:
        if kernel == DENSE:
            return _composed(_dense(x, matrices, fmt, gate), epsilon, None)
        if kernel == SKINNY:
            config = skinny_spread(choice.path, rows, n, k, fmt, len(matrices) == 1)
        else:
            config = configure("qmv", choice.path, rows, n, k, x.dtype, fmt, kind)
        return _vector(QmvArrays.of(arrays), fmt, config, epsilon, gate, choice.path)

    return either(choice, composed, arrays, bind)


def with_squares(arrays: list[Any], *static: Any) -> list[Any]:
    """Arrays of a proof, of which the third are sums of squares if they are there."""
    x, other, squares, *rest = arrays
    return [x, other, None if squares is None else 16 * (1 + mx.abs(squares)), *rest]


_TAKES = Signature(f"""
    x: float (*R, K)
    the weight of norm: any (K,) or None
    partial_squares: float32 (M, T) or None
    gate: {str((*ACTIVATIONS,))[1:-1]} or None
""")
_BIAS = Signature("bias: any (N,) or None")
_DEFERRED = Signature("deferred_weight: any (N,) or None")
FUSED_PRODUCTS = Operation("fused_products", _plan, compiled=True, sample=with_squares)


def _norm_first(device: str, gate: Gate | None) -> bool:
    """Whether a launch of its own for the norm is faster than to fold it into the product."""
    return bool(threshold("norm_first", "gate" if gate else "plain", device=device))


def _kind(matrices: list[PackedMatrix], norm: bool, gate: Gate | None, residual: Any) -> str:
    """The kind of a launch by what it does besides a product, for the tuner."""
    norm = norm and not _norm_first(backend(), gate)
    names = ["norm"] * norm + ["gate"] * (gate is not None) + ["residual"] * (residual is not None)
    count = len(matrices)
    return "-".join([*names, *[str(count)] * (count > 1 and gate is None)])


def _composed(multiply: _Multiply, epsilon: float | None, gate: Gate | None) -> _Run:
    """The norm, the products and what follows them, one after the other."""
    by_kernel = gate == "silu" and current.get().invariant  # as in prompts

    def run(*arrays: Any) -> list[mx.array]:
        x, weight, partial_squares, residual, deferred_weight, *flat = arrays
        # On a GPU neither MLX's norm nor its compiled activations take arrays without elements.
        rows = x
        if epsilon is not None and x.size:
            rows = normed(x, weight, epsilon, partial_squares)
        products = multiply(rows, residual, flat)
        if gate is not None:
            act, other = products
            by_swiglu = by_kernel or not act.size
            products = [swiglu(act, other) if by_swiglu else ACTIVATIONS[gate](act) * other]
        return _with_deferred_norm(products, deferred_weight)

    return run


def _one_by_one(fmt: Format) -> _Multiply:
    """The single operations."""

    def multiply(x: mx.array, residual: mx.array | None, flat: list[Any]) -> list[mx.array]:
        products = []
        for i in range(0, len(flat), 4):
            w, scales, biases, bias = flat[i : i + 4]
            products.append(quantized_matmul(x, w, scales, biases, True, *fmt, bias=bias))
        return products if residual is None else [residual + products[0]]

    return multiply


def _by_tensors(
    x: Spec, matrices: list[PackedMatrix], residual: Spec | None, fmt: Format, gate: Gate | None
) -> tuple[Choice, _Multiply] | None:
    """Many rows by tensor operations with what follows, where those were measured to be fastest.

    Without a gate or a residual there is nothing that follows: each product has its own route.
    """
    if not takes_tensors(x) or (gate is None and residual is None):
        return None
    call = MatmulCall(x, matrices[0], True, fmt)
    best = found("qmm", *call.shape, x.dtype, fmt, True)
    if best is None or not by_tensors(best):
        return None
    kernel, *others = in_turn(best, PATHS)
    choice = choose("fused_products", by=kernel, best=best, wins=best.path)
    given = call, residual, None if gate is None else matrices[1], gate
    launch = first_proven(
        {each: partial(tensor_product, each == CODES, *given) for each in (kernel, *others)}
    )

    def multiply(x: mx.array, residual: mx.array | None, flat: list[Any]) -> list[mx.array]:
        return [launch(x, *flat[:4], residual, *flat[4:])]

    return choice, multiply


def _vector(
    specs: QmvArrays, fmt: Format, config: Any, epsilon: float | None, gate: Gate | None, path: str
) -> _Run:
    """All in one launch, or with one for the norm where that was measured to be faster."""
    deferred, first = specs.partial_squares is not None, _norm_first(path, gate)
    if takes_deferred_norm(config, specs.matrices) or not (deferred or specs.deferred_weight):
        return qmv(specs, fmt, config, epsilon=epsilon, gate=gate, norm_first=first)
    # This configuration takes no deferred norm: what comes of one is computed around the launch.
    plain = specs._replace(partial_squares=None, deferred_weight=None)
    inside = None if deferred else epsilon
    launch = qmv(plain, fmt, config, epsilon=inside, gate=gate, norm_first=first)

    def run(*arrays: Any) -> list[mx.array]:
        x, weight, partial_squares, residual, deferred_weight, *flat = arrays
        if deferred:
            x = normed(x, None, epsilon or 0.0, partial_squares)
        products = launch(x, weight, None, residual, None, *flat)
        return _with_deferred_norm(products, deferred_weight)

    return run


def _dense(x: Spec, matrices: list[PackedMatrix], fmt: Format, gate: Gate | None) -> _Multiply:
    """Many rows: the matrices dequantized in one launch, for one dense product."""
    unpack, sizes = dequantize(matrices, fmt, x.dtype), [m.w.shape[0] for m in matrices]
    (*leading, k), begins = x.shape, list(accumulate(sizes))[:-1]
    whole = len({m.bias is None for m in matrices}) == 1 and sizes[0] % RUN == 0
    joined = Spec((prod(leading), sum(sizes)), x.dtype)
    gated = gated_rows(joined, gate) if gate and whole else None

    def multiply(x: mx.array, residual: mx.array | None, flat: list[Any]) -> list[mx.array]:
        rows, biases = x.reshape(-1, k), flat[3::4]
        dense = unpack(*(a for i, a in enumerate(flat) if i % 4 < 3 and a is not None))
        if residual is not None:
            y = mx.addmm(residual.reshape(-1, sizes[0]), rows, dense.T)
        elif all(bias is not None for bias in biases):
            whole = biases[0] if len(biases) == 1 else mx.concatenate(biases)
            y, biases = mx.addmm(whole, rows, dense.T), []
        else:
            y = rows @ dense.T
        if gated is not None:
            return [gated(y).reshape(*leading, -1)]
        products = mx.split(y, begins, axis=1) if begins else [y]
        for i, bias in enumerate(biases):
            if bias is not None:
                products[i] += bias
        if gate:
            products = [ACTIVATIONS[gate](products[0]) * products[1]]
        return [y.reshape(*leading, -1) for y in products]

    return multiply


def _with_deferred_norm(products: list[mx.array], weight: mx.array | None) -> list[mx.array]:
    """With a weight: a product, that times the weight, and its ``partial_squares``."""
    if weight is None:
        return products
    (y,) = products
    rows, n = y.astype(mx.float32), y.shape[-1]
    tiles = mx.pad(rows.reshape(-1, n) ** 2, [(0, 0), (0, -n % 16)]).reshape(-1, -(-n // 16), 16)
    return [y, (rows * weight.astype(mx.float32)).astype(y.dtype), tiles.sum(-1)]


def normed(
    x: mx.array, weight: mx.array | None, eps: float, partial_squares: mx.array | None
) -> mx.array:
    """Rows behind an RMS norm, by their own squares, or by those of what they were before."""
    if partial_squares is None:
        return mx.fast.rms_norm(x, weight, eps)
    scale = mx.rsqrt(partial_squares.sum(-1) / x.shape[-1] + eps).reshape(*x.shape[:-1], 1)
    return (x.astype(mx.float32) * scale).astype(x.dtype)


def _lacking(
    x: Spec, rows: int, matrices: Sequence[PackedMatrix], floats: list[Spec | None]
) -> str | None:
    """Why no kernel takes these arguments, if none does."""
    if not rows:
        return "there are no rows"
    if rows > MAX_QMV_ROWS and x.dtype == mx.float32 and device_of().stock_is_tf32:
        return f"{rows} rows in float32, whose dense products MLX computes in TF32"
    if len(matrices) > MAX_MATRICES:
        return f"{len(matrices)} matrices; the kernel takes 1 to {MAX_MATRICES}"
    if any(m.w.ndim > 2 or 0 in m.w.shape for m in matrices):
        return "the kernel takes matrices that are not empty"
    for _, scales, biases, bias in matrices:
        floats += [biases, bias] if biases is None else [scales, biases, bias]
    others = {str(a.dtype) for a in floats if a is not None} - {str(x.dtype)}
    if others:
        return f"x is {x.dtype}, other arrays are {', '.join(sorted(others))}"
    return None


def _check(
    rows: Sequence[Any],
    matrices: Sequence[PackedMatrix],
    fmt: Format,
    epsilon: float | None,
    gate: str | None,
) -> None:
    """Raise for what is wrong with arguments that :func:`quantized_matmul` does not know."""
    x, weight, partial_squares, residual, deferred_weight = rows
    if not matrices:
        raise ValueError("matrices must have at least one element")
    tiles = {"M": prod(x.shape[:-1]), "T": -(-x.shape[-1] // 16)} if x.ndim else {}
    _TAKES.check(x, weight, partial_squares, gate, **tiles)
    for w, scales, biases, bias in matrices:
        check_packed(x, w, scales, biases, True, fmt, "matrices: ")
        _BIAS.check(bias, N=w.shape[0])
    shapes = [m.w.shape for m in matrices]
    single, n = gate is None and len(matrices) == 1, shapes[0][0]
    if gate is not None and (len(shapes) != 2 or shapes[0] != shapes[1]):
        raise ValueError(f"gate needs two matrices of one shape, not shapes {shapes}")
    if residual is not None and not (single and residual.shape == (*x.shape[:-1], n)):
        raise ValueError(
            f"residual must have the shape {(*x.shape[:-1], n)} of the product with a single "
            f"matrix, not {residual.shape} with gate {gate!r} and {len(shapes)} matrices"
        )
    if partial_squares is not None and (epsilon is None or weight is not None):
        raise ValueError("partial_squares needs a norm without weight")
    if deferred_weight is not None and not single:
        raise ValueError("deferred_weight needs a single matrix and no gate")
    _DEFERRED.check(deferred_weight, N=n)
