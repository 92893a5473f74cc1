"""The cross entropy of a linear layer's outputs, which are never in memory as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ...dispatch import Choice, Gradient, Operation, Plan, dispatch
from ...formats import Format
from ...runtime.backend import Mode, mode
from ...runtime.devices import device_of
from ...runtime.spec import Spec
from ...runtime.transformed import has_values, without_derivative
from ..signature import Signature
from .blocks import Blocks, Head, added, in_one_pass, on_cpu, product


def linear_cross_entropy(
    x: mx.array,
    targets: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    bias: mx.array | None = None,
    group_size: int | None = 64,
    bits: int | None = 4,
    mode: str = "affine",
    mask: mx.array | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> mx.array:
    """Cross entropy of the logits ``x weight^T + bias``, as of a language model's output layer.

    Logits are computed in blocks of rows and columns, and again for gradients, so that memory is
    independent of the vocabulary's size. Logarithms of sums are float32. On a GPU each logit is
    rounded to the dtype of ``x`` and the weights first, as the layer itself rounds it.

    A target outside of the vocabulary, such as the -100 of PyTorch, takes its row out: its loss is
    0, and a mean does not count it.

    Args:
        x: (..., K), what the layer is given, in float32, float16 or bfloat16.
        targets: (...) integers, the tokens that are right.
        weight: (V, K) in float32, float16 or bfloat16; or, with ``scales``,
            (V, K * bits / 32) packed in uint32. An embedding, where that is the output layer too.
        scales: (V, K / group_size), if the matrix is quantized.
        biases: like ``scales`` in mode ``"affine"``, else None.
        bias: (V,) floating point, added to the logits.
        group_size: elements that share a scale; None stands for the mode's default.
        bits: bits an element; None stands for the mode's default.
        mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``.
        mask: (...) booleans or floating point: what each row weighs.
        label_smoothing: the share, below 1, of the target that all tokens have equally.
        softcap: the c of ``c tanh(logits / c)``, in the place of the logits.
        reduction: ``"none"``, ``"sum"``, or ``"mean"``, the sum divided by that of the weights.

    Returns:
        float32: (...) or, reduced, (). The mean of no rows is NaN. It can be differentiated once,
        by ``x``, ``weight``, ``scales``, ``biases``, ``bias`` and ``mask``. ``mx.jvp`` raises.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> x, targets = mx.random.normal((2, 5, 64)), mx.zeros((2, 5), mx.int32)
        >>> packed = mx.quantize(mx.random.normal((1000, 64)))
        >>> loss, dx = mx.value_and_grad(linear_cross_entropy)(x, targets, *packed)
        >>> dx.shape
        (2, 5, 64)

    Source: Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009.
    """
    arrays = x, targets, weight, scales, biases, bias, mask
    static = group_size, bits, mode, label_smoothing, softcap, reduction
    loss: mx.array = dispatch(_LOSS, arrays, static)
    return loss


def log_probabilities(
    x: mx.array,
    targets: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """Log probabilities of tokens by an output layer, as preference losses need them.

    Args:
        x, targets, weight, scales, biases: as :func:`linear_cross_entropy` takes them.
        options: its ``bias``, ``group_size``, ``bits``, ``mode`` and ``softcap``.

    Returns:
        (...) in float32; 0 where a target is outside of the vocabulary.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> found = log_probabilities(mx.zeros((3, 8)), mx.array([0, 1, 1]), mx.ones((2, 8)))
        >>> mx.exp(found).tolist()
        [0.5, 0.5, 0.5]

    Source: :func:`linear_cross_entropy`.
    """
    loss = linear_cross_entropy(x, targets, weight, scales, biases, reduction="none", **options)
    return -loss


_TAKES = Signature("""
    weight: float (V, K); V > 0 and K > 0
    x: float (*R, K)
    targets: integer (*R)
    bias: float (V,) or None
    mask: bool|float (*R) or None
    label_smoothing: number >= 0
    softcap: number > 0 or None
    reduction: 'none', 'sum', 'mean'
""")
_PACKED = Signature("weight: uint32 (V, W); V > 0 and W > 0")


def _plan(arrays: Sequence[Any], *static: Any) -> Plan:
    group_size, bits, kind, smoothing, softcap, reduction = static
    x, targets, weight, scales, biases, bias, mask = arrays
    fmt, dense = Format.checked(group_size, bits, kind), weight
    if scales is not None:
        vocabulary = _PACKED.check(weight)["V"]
        if problem := fmt.mismatch(weight, scales, biases):
            raise ValueError(re.sub(r"\bw\b", "weight", problem))
        dense = Spec((vocabulary, fmt.dims(weight)), mx.float32)
    elif biases is not None:
        raise ValueError("biases must be None where scales is None")
    _TAKES.check(dense, x, targets, bias, mask, smoothing, softcap, reduction)
    if smoothing >= 1:
        raise ValueError(f"label_smoothing must be below 1, not {smoothing!r}")
    vocabulary, width = dense.shape
    options = (
        fmt if scales is not None else None,
        float(smoothing),
        None if softcap is None else float(softcap),
    )

    def run(x: mx.array, targets: mx.array, *given: Any) -> mx.array:
        *head, mask = given
        # Other dtypes hold fewer numbers than there may be tokens.
        numbers = targets.astype(mx.int64 if targets.dtype.size == 8 else mx.int32)
        inside = (numbers >= 0) & (numbers < vocabulary)
        numbers = mx.where(inside, numbers, -1).astype(mx.int32)
        weights = inside.astype(mx.float32) if mask is None else inside * mask.astype(mx.float32)
        rows = x.reshape(-1, width), numbers.reshape(-1), *head
        losses = dispatch(_OF_ROWS, rows, options)[0].reshape(targets.shape)
        losses = mx.where(weights == 0, 0, losses * weights)
        if reduction == "none":
            return losses
        return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()

    return Plan(None, run)


Arrays = Sequence[Any]


def _plan_rows(arrays: Arrays, fmt: Format | None, smoothing: float, softcap: float | None) -> Plan:
    x, _, weight, scales, biases, bias = arrays
    if not x.size:
        return Plan(None, lambda *_: [mx.zeros((0,))] * 3)
    given = [a for a in (x, scales if fmt else weight, biases) if a is not None]
    floats = [a.dtype for a in given if a.dtype != mx.uint8]
    dtype = mx.float32 if on_cpu() else mx.result_type(*(mx.array(0, d) for d in floats))

    def blocks(x: mx.array, targets: mx.array, *head: Any) -> Blocks:
        weight, scales, biases, bias = head
        # On a GPU MLX frees a block's arrays in turn only where nothing has values yet.
        at_once = on_cpu() and has_values([a for a in (x, targets, *head) if a is not None])
        made = Head(weight, scales, biases, bias, fmt, softcap, dtype, at_once)
        return Blocks(x.astype(dtype), targets, made, smoothing)

    def run(*given: Any) -> list[mx.array]:
        made = blocks(*given)

        def losses() -> list[mx.array]:
            with mode(Mode.GRADIENT):
                return made.losses()

        # Blocks that are computed at once remember nothing: mx.jvp would see constants.
        there = [a for a in given if a is not None]
        return without_derivative(losses, there) if made.head.at_once else losses()

    def once(compute: Callable[..., list[mx.array]]) -> Callable[..., list[mx.array]]:
        """The other outputs have cotangents that go nowhere: no second derivative."""

        def gradient(given: Arrays, cotangents: Arrays, outputs: Arrays) -> list[mx.array]:
            there = [a for a in (*given, *cotangents, *outputs) if a is not None]
            made = blocks(*given)
            # On a GPU nothing is computed ahead: inside of mx.grad all that was would stay.
            made = made if made.head.at_once and has_values(there) else made.later()
            call = partial(compute, made, cotangents[0][:, None], outputs, given)
            return without_derivative(call, there)

        return gradient

    gradients = [Gradient((0,), once(_of_x))]
    if fmt is None:
        gradients.append(Gradient((2,), once(partial(_of_columns, _of_weight, (2,)))))
    elif biases is not None:
        gradients.append(Gradient((3, 4), once(partial(_of_columns, _of_groups, (3, 4)))))
    if bias is not None:
        gradients.append(Gradient((5,), once(partial(_of_columns, _of_bias, (5,)))))
    why = "on a CPU, blocks of a dense matrix are MLX's products"
    by_mlx = on_cpu() and (fmt is None or not device_of().kernels)
    choice = Choice("linear_cross_entropy", "reference", why) if by_mlx else None
    return Plan(choice, run, gradients)


def _of_x(blocks: Blocks, dy: mx.array, outputs: Arrays, given: Arrays) -> list[mx.array]:
    loss, lse, shares = outputs
    counted = blocks.counted(dy, loss, shares, given[0].dtype)
    found, state = [], list[mx.array]()
    for rows in blocks.rows:
        dx = mx.zeros((rows.stop - rows.start, blocks.x.shape[1]))
        for columns in blocks.columns:
            now, some = blocks.after(state), counted(rows, columns)
            if some is None:
                continue
            g = now.slopes(some, columns, lse, now.head.dtype)
            part = now.head.part(columns).times(g, False)
            if some is rows:
                dx = in_one_pass(added)(dx, part)
            else:
                dx = dx.at[some - rows.start].add(part.astype(mx.float32))
            (dx,) = state = blocks.there([dx])
        # Times what may be tiny behind the product: half precision holds more of it.
        found.append((dx * dy[rows]).astype(given[0].dtype))
    return [mx.concatenate(found)]


# From some columns, the slopes and the rows times their cotangents to gradients in float32.
Parts = Callable[[Head, mx.array, mx.array, mx.array], list[mx.array]]


def _of_columns(
    parts: Parts, of: Sequence[int], blocks: Blocks, dy: mx.array, outputs: Arrays, given: Arrays
) -> list[mx.array]:
    """The gradients of what belongs to columns."""
    loss, lse, shares = outputs
    counted = blocks.counted(dy, loss, shares, given[0].dtype)
    found, state = [], list[mx.array]()
    for columns in blocks.columns:
        sums = [mx.zeros((1,) * given[i].ndim) for i in of]
        for rows in blocks.rows:
            now, some = blocks.after(state), counted(rows, columns)
            if some is None:
                continue
            g = now.slopes(some, columns, lse)
            made = parts(now.head.part(columns), g, now.x[some], dy[some])
            sums = state = blocks.there([a + b for a, b in zip(sums, made, strict=True)])
        state = []
        for i, some in zip(of, sums, strict=True):
            shape = columns.stop - columns.start, *given[i].shape[1:]
            state.append(mx.broadcast_to(some, shape).astype(given[i].dtype))
        found.append(state)
    return [mx.concatenate(list(each)) for each in zip(*found, strict=True)]


def _of_weight(head: Head, g: mx.array, x: mx.array, dy: mx.array) -> list[mx.array]:
    scaled = (x.astype(mx.float32) * dy).astype(head.dtype)
    return [product(g.T.astype(head.dtype), scaled).astype(mx.float32)]


def _of_groups(head: Head, g: mx.array, x: mx.array, dy: mx.array) -> list[mx.array]:
    (dense,), groups = _of_weight(head, g, x, dy), (*head.scales.shape, -1)
    ones = mx.ones(head.scales.shape)
    codes = head.fmt.dequantize(head.weight, ones, mx.zeros_like(ones))
    return [_in_pairs(a.reshape(groups)) for a in (dense * codes, dense)]


def _in_pairs(a: mx.array) -> mx.array:
    """Sums along the last axis, of a power of two: in turn, equal terms would lose 3 ulp."""
    while (half := a.shape[-1] // 2) > 0:
        a = a[..., :half] + a[..., half:]
    return a[..., 0]


def _of_bias(head: Head, g: mx.array, x: mx.array, dy: mx.array) -> list[mx.array]:
    return [(g * dy).sum(0)]


_LOSS = Operation("linear_cross_entropy", _plan)
_OF_ROWS = Operation("linear_cross_entropy, of rows", _plan_rows)


def examples() -> Iterator[tuple[str, dict[str, Any], Sequence[str]]]:
    """Calls: what each is of, the arguments by name, and those that are differentiated."""
    targets = mx.array([[0, 40, 3, 17, -100], [7, 7, 22, 39, 1]])
    # In float32, as a GPU rounds logits to lower precisions, and a CPU does not.
    x, dense = mx.random.normal((2, 5, 64)), {"weight": mx.random.normal((41, 64)) / 8}
    packed = dict(
        zip(("weight", "scales", "biases"), mx.quantize(dense["weight"], 32, 4), strict=True)
    )
    more = {"group_size": 32, "mask": mx.arange(10).reshape(2, 5) % 3 != 1, "softcap": 5.0}
    yield "4 bits", {"x": x, "targets": targets} | packed | more, ("x", "scales", "biases")
    yield "dense", {"x": x, "targets": targets} | dense, ("x", "weight")
