"""Products of one input with several matrices in one launch, each with the bits of its own one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import Plan, choose, gradient_of
from ..formats import Format
from ..metal.quantized_matmul.qmv import Gate, QmvArrays, qmv
from ..metal.quantized_matmul.qmv_config import MAX_QMV_ROWS, invariant_config
from ..metal.quantized_matmul.tile import Tile
from ..runtime.devices.record import MAX_THREADGROUP_MEMORY
from ..runtime.program import CONSTANT_BELOW
from ..runtime.spec import Spec
from .quantized_route import QMV, in_blocks, is_qmv

Run = Callable[..., list[mx.array]]


def plan_rounded(
    arrays: Sequence[Any], fmt: Format, gate: Gate | None, lacking: str | None, composed: Run
) -> Plan:
    """Of a batch-invariant model on a GPU, with the bits of operators that are launched one by one.

    Args:
        arrays: those of :func:`.fused_products.fused_products`, without a norm.
        fmt: of the matrices.
        gate: of two of them.
        lacking: why no kernel takes them, if none does.
        composed: the single operators.
    """
    specs, choice = QmvArrays.of(arrays), choose("fused_products", by=QMV)
    if lacking or choice.path == "reference":
        return Plan(None, composed)
    if joined_config(choice.path, specs, fmt, gate) is None:
        return Plan(None, composed)

    def bind(some: QmvArrays) -> Run:
        config = joined_config(choice.path, some, fmt, gate)
        assert config is not None  # whether there is one does not depend on rows
        return qmv(some, fmt, config, gate=gate, rounds=True)

    def of_rows(count: int) -> Run:
        x, residual = (
            each and Spec((count, each.shape[-1]), each.dtype) for each in (specs.x, specs.residual)
        )
        return bind(specs._replace(x=x, residual=residual))

    places = [0] if specs.residual is None else [0, QmvArrays._fields.index("residual")]
    run = bind(specs) if is_qmv(specs.x) else in_blocks(of_rows, specs.x, places)
    return Plan(choice, run, gradient_of(composed, arrays), composed)


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
