"""Operators of batch-invariant models on a GPU, and products that do several of them in one launch.

Each fused product has the bits of :func:`.quantized_matmul.quantized_matmul` and of the norms and
gates of this file, one by one, whatever number of rows there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..dispatch import Operation, Plan, choose, dispatch, gradient_of
from ..formats import Format
from ..metal.quantized_matmul.gated import RUN, gated_rows
from ..metal.quantized_matmul.normed import MAX_WIDTH, norm_rows
from ..metal.quantized_matmul.qmv import Gate, QmvArrays, qmv
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS, invariant_config
from ..metal.quantized_matmul.tile import Tile
from ..runtime.devices.record import MAX_THREADGROUP_MEMORY
from ..runtime.program import CONSTANT_BELOW
from ..runtime.spec import Spec
from .quantized_matmul import quantized_matmul
from .quantized_route import QMV, in_blocks, is_qmv

Run = Callable[..., list[mx.array]]
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_approx": nn.gelu_approx,
}


def normed_rows(x: mx.array, weight: mx.array, epsilon: float) -> mx.array:
    """``mx.fast.rms_norm`` with squares added up as products add them for the norm behind them."""
    y: mx.array = dispatch(NORMED_ROWS, (x, weight), (epsilon,))
    return y


def gated_pair(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x``, rounded once, as ``mlx_lm.models.activations.swiglu`` is not."""
    y: mx.array = dispatch(GATED_PAIR, (gate, x), ("silu",))
    return y


def _plan_norm(arrays: Sequence[Any], epsilon: float) -> Plan:
    x, weight = arrays
    choice, composed = choose("rms_norm"), partial(mx.fast.rms_norm, eps=epsilon)
    if choice.path == "reference" or not takes_norm(x, weight):
        return Plan(None, composed)
    return Plan(choice, norm_rows(x, epsilon), gradient_of(composed, arrays), composed)


def takes_norm(x: Any, weight: Any) -> bool:
    """Whether rows go through a norm of this file."""
    fits = weight.shape == x.shape[-1:] and CONSTANT_BELOW <= weight.shape[0] <= MAX_WIDTH
    return fits and x.dtype == weight.dtype and x.size > 0


def _plan_gate(arrays: Sequence[Any], gate: Gate) -> Plan:
    choice = choose("gated_product")

    def composed(first: mx.array, second: mx.array) -> mx.array:
        return ACTIVATIONS[gate](first) * second

    x = arrays[0]
    if choice.path == "reference" or not takes_gate(*arrays):
        return Plan(None, composed)
    launch = gated_rows(Spec((x.size // x.shape[-1], x.shape[-1]), x.dtype), gate, apart=True)

    def run(*rows: mx.array) -> mx.array:
        return launch(*rows).reshape(x.shape)

    return Plan(choice, run, gradient_of(composed, arrays), composed)


def takes_gate(x: Any, other: Any) -> bool:
    """Whether two products are gated by this file."""
    return x.shape == other.shape and x.dtype == other.dtype and x.shape[-1] % RUN == 0 < x.size


NORMED_ROWS = Operation("rms_norm", _plan_norm)
GATED_PAIR = Operation("gated_product", _plan_gate)


def plan_rounded(
    arrays: Sequence[Any],
    static: tuple[Format, float | None, Gate | None],
    lacking: str | None,
    composed: Run,
    finish: Callable[[list[mx.array], Any], list[mx.array]],
) -> Plan:
    """Products with the bits of operators that are launched one by one.

    Args:
        arrays: those of :func:`.fused_products.fused_products`. With ``partial_squares``, of ``x``
            as it is, there is a weight of the norm, too.
        static: the format, the epsilon of the norm, and the gate.
        lacking: why no kernel takes them, if none does.
        composed: the same in stock operators.
        finish: of products and a deferred norm's weight, what is left to do without a kernel.
    """
    specs, (fmt, epsilon, gate), config = QmvArrays.of(arrays), static, None
    choice = choose("fused_products", by=QMV)
    if not lacking and choice.path != "reference":
        config = joined_config(choice.path, specs, fmt, gate)
    deferred = specs.partial_squares is not None or specs.deferred_weight is not None
    if config is None or (deferred and not config.units):
        return Plan(None, partial(_one_by_one, fmt, epsilon, gate, finish))
    launch = _launch(choice.path, specs, fmt, epsilon if deferred else None, gate)
    if epsilon is None or specs.partial_squares is not None:
        return Plan(choice, launch, gradient_of(composed, arrays), composed)

    def run(x: mx.array, weight: mx.array | None, *others: Any) -> list[mx.array]:
        return launch(_normed(x, weight, epsilon), None, *others)

    return Plan(choice, run, gradient_of(composed, arrays), composed)


def _launch(
    path: str, specs: QmvArrays, fmt: Format, epsilon: float | None, gate: Gate | None
) -> Run:
    """The launch, or one for each block of rows."""
    if specs.partial_squares is None:  # the norm, if there is one, is computed ahead
        specs, epsilon = specs._replace(norm_weight=None), None

    def bind(some: QmvArrays) -> Run:
        config = joined_config(path, some, fmt, gate)
        assert config is not None  # whether there is one does not depend on rows
        return qmv(some, fmt, config, epsilon=epsilon, gate=gate, rounds=True)

    names = ("x", "partial_squares", "residual")
    of_rows: dict[str, Any] = {
        name: each for name in names if (each := getattr(specs, name)) is not None
    }

    def few(count: int) -> Run:
        rows: dict[str, Any] = {n: Spec((count, a.shape[-1]), a.dtype) for n, a in of_rows.items()}
        return bind(specs._replace(**rows))

    places = [QmvArrays._fields.index(name) for name in of_rows]
    return bind(specs) if is_qmv(specs.x) else in_blocks(few, specs.x, places)


def _normed(x: mx.array, weight: mx.array | None, epsilon: float) -> mx.array:
    return mx.fast.rms_norm(x, None, epsilon) if weight is None else normed_rows(x, weight, epsilon)


def _one_by_one(
    fmt: Format, epsilon: float | None, gate: Gate | None, finish: Any, *arrays: Any
) -> list[mx.array]:
    """The operators whose bits are those of all launches."""
    x, weight, _, residual, deferred_weight, *flat = arrays
    x = x if epsilon is None else _normed(x, weight, epsilon)
    packed = (flat[i : i + 4] for i in range(0, len(flat), 4))
    products = [
        quantized_matmul(x, w, scales, biases, True, *fmt, bias=bias)
        for w, scales, biases, bias in packed
    ]
    if gate is not None:
        products = [dispatch(GATED_PAIR, tuple(products), (gate,))]
    if residual is not None:
        products = [residual + products[0]]
    made: list[mx.array] = finish(products, deferred_weight)
    return made


def joined_config(path: str, specs: QmvArrays, fmt: Format, gate: Gate | None) -> Tile | None:
    """The configuration of one launch that adds up each column as a launch of its matrix alone.

    None if there is none: matrices of other heights may be added up in other orders.
    """
    (*_, k), dtype = specs.x.shape, specs.x.dtype
    rows = min(specs.x.size // k, MAX_QMV_ROWS)
    sizes = [m.w.shape[0] for m in specs.matrices]
    own = [invariant_config(path, rows, n, k, dtype, fmt) for n in sizes]
    config = invariant_config(path, rows, sum(sizes), k, dtype, fmt)
    if config.order != own[0].order:
        config = own[0]
    if gate:
        config = config.paired(in_order=True)
    small = any(m.w.size < CONSTANT_BELOW for m in specs.matrices)  # which take other kernels
    if small or any(each.order != config.order for each in own):
        return None
    return None if config.units and config.memory(fmt) > MAX_THREADGROUP_MEMORY else config
