"""Launches the attention kernels of Hopper GPUs: large tiles, and products beside the warps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ...runtime.backend import use_backend
from ...runtime.cuda_ahead import device_architecture
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound, TemplateValue
from ...runtime.spec import Spec
from .forward import FORWARD_INPUTS, Launcher, absent, forward_inputs
from .layout import tile_bytes

_CUT = ("SIMDS", "TILE", "RESIDENT", "SHARED")
_kernel = partial(Kernel, large=True, ensure_row_contiguous=False)
_AHEAD = _kernel(
    "attention_forward_ahead",
    "attention/forward_ahead.metal",
    inputs=FORWARD_INPUTS,
    outputs=("out", "norms"),
    template=("T", "M", "N", "D", "DV", "MASK", "SOFTCAP", "SINKS", "AVERAGE", *_CUT),
    threadgroup_memory=lambda **values: _declared("forward", values),
)
_STATISTICS = _kernel(
    "attention_backward_statistics",
    "attention/backward_once.metal",
    inputs=("out", "d_out", "norms"),
    outputs=("statistics",),
    template=("T", "DV"),
)
_ONCE = _kernel(
    "attention_backward_once",
    "attention/backward_once.metal",
    inputs=("q", "k", "v", "mask", "d_out", "statistics", "average", "sizes", "factors"),
    outputs=("d_q", "d_k", "d_v"),
    template=("T", "M", "D", "DV", "MASK", "SOFTCAP", "AVERAGE", "GROUPED", "SLICES", *_CUT),
    atomic_outputs=True,
    threadgroup_memory=lambda **values: _declared("backward", values),
)


@dataclass(frozen=True)
class Cut:
    """How a kernel spreads its work.

    Attributes:
        simds: SIMD groups of a threadgroup, each with 16 queries forward and 16 keys backward.
        slices: SIMD groups that share keys backward, each with its part of the columns.
        tile: keys forward, queries backward that it looks at together.
        resident: threadgroups that a multiprocessor should have registers for.
    """

    simds: int = 8
    tile: int = 64
    slices: int = 1
    resident: int = 1

    def template(self, kernel: str, at: Launcher) -> dict[str, TemplateValue]:
        """The values of the template's last parameters."""
        values: dict[str, TemplateValue] = {"SIMDS": self.simds, "TILE": self.tile}
        if kernel == "backward":
            values["SLICES"] = self.slices
        widths = {"T": at.q.dtype, "D": at.width, "DV": at.v_width}
        places = 3 if self.slices == 1 else 2
        shared = memory(kernel, values | widths, places) if at.device == "cuda" else 0
        return values | {"RESIDENT": self.resident, "SHARED": shared}


# By kernel and the widest head. On an H200 gradients of 32 heads of 64, 4,096 queries, took 684 us
# by the kernels without atomics and 739 by this one, those of 28 of 128 1,133 and 1,070.
_TABLE: dict[str, dict[int, Cut | None]] = {
    "forward": {64: Cut(4, resident=3), 128: Cut(4, resident=2)},
    "backward": {64: None, 128: Cut()},
}
# Keys forward, and scores backward, from which they were measured to be faster.
_LEAST = {"forward": 512, "backward": 1 << 26}


def cut(kernel: str, at: Launcher) -> Cut | None:
    """How to spread the work of a call, if it is one for these kernels.

    Args:
        kernel: ``"forward"``, or ``"backward"``: gradients that are added up by atomics.
        at: the shapes.
    """
    fits = at.device == "cuda" and at.q.dtype.size == 2 and not at.packing[1]
    if not fits or device_architecture() != "sm_90":
        return None
    scores = at.batch * at.heads * at.queries * at.keys
    size, excluded = (at.keys, False) if kernel == "forward" else (scores, at.deterministic)
    if excluded or size < _LEAST[kernel]:
        return None
    widest = max(at.width, at.v_width)
    return next((best for width, best in _TABLE[kernel].items() if widest <= width), None)


def forward_ahead(at: Launcher, chosen: Cut) -> Callable[..., list[mx.array]]:
    """The launch of :func:`.forward.attention_forward` as ``chosen`` spreads it."""
    average, nothing = at.average, Spec.of(absent())
    sinks = nothing if at.sinks is None else at.sinks
    launch = _bind(
        _AHEAD,
        at,
        chosen,
        [sinks, Spec((at.batch, at.kv_heads, at.v_width), mx.float32) if average else nothing],
        at.queries,
        [(at.batch, at.queries, at.heads, at.v_width), (at.batch, at.heads, at.queries, 2)],
        chosen.template("forward", at) | {"N": sinks.dtype, "SINKS": at.sinks is not None},
    )

    def run(*arrays: mx.array | None) -> list[mx.array]:
        out, norms = launch(forward_inputs(at, *arrays))
        return [out.swapaxes(1, 2), norms]

    return run


def backward_once(at: Launcher, chosen: Cut) -> Callable[..., list[mx.array]]:
    """The launches of the gradients of q, k and v as ``chosen`` spreads them.

    Returns:
        A function of q, k, v and the broadcast mask, of out, its cotangent, the norms of the
        forward pass and what each value gets of the queries that see no key. It gives d_q
        (B, L, H, D), d_k (B, S, Hkv, D) and d_v (B, S, Hkv, Dv) in the dtype of q, and the sums of
        the products of out and its cotangent (B, H, L) in float32.
    """
    dtype, rows = at.q.dtype, (at.batch, at.heads, at.queries)
    out, norms = Spec((*rows, at.v_width), dtype), Spec((*rows, 2), mx.float32)
    grouped, count = at.heads != at.kv_heads, 8 * at.batch * at.heads * at.queries
    with use_backend(at.device):
        prepare = _STATISTICS.bind(
            [out, out, norms],
            template={"T": dtype, "DV": at.v_width},
            grid=(-(-count // 256) * 256, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[norms.shape],
        )
    average = (at.batch, at.kv_heads, at.v_width) if at.average else absent().shape
    # A float holds two numbers of 16 bits.
    of_keys, packed = (at.batch, at.keys, at.kv_heads), 1 if grouped else 4 // dtype.size
    launch = _bind(
        _ONCE,
        at,
        chosen,
        [out, norms, Spec(average, mx.float32)],
        at.keys * chosen.slices,
        [
            (at.batch, at.queries, at.heads, at.width),
            (*of_keys, at.width // packed),
            (*of_keys, at.v_width // packed),
        ],
        chosen.template("backward", at) | {"GROUPED": grouped},
        init_value=0,
    )

    def run(given: list[mx.array], *others: mx.array) -> list[mx.array]:
        out, d_out, norms, average = others
        (statistics,) = prepare([out, d_out, norms])
        d_q, *sums = launch([*given, d_out, statistics, average, *at.ends])
        d_k, d_v = (a.astype(dtype) if grouped else a.view(dtype) for a in sums)
        return [d_q.astype(dtype), d_k, d_v, statistics[..., 1]]

    return run


def _bind(
    kernel: Kernel,
    at: Launcher,
    chosen: Cut,
    others: list[Spec],
    rows: int,
    shapes: list[tuple[int, ...]],
    values: dict[str, TemplateValue],
    init_value: float | None = None,
) -> Bound:
    """The launch of as many threadgroups as own so many rows of all query heads."""
    threads = 32 * chosen.simds
    grid = threads * -(-rows // (16 * chosen.simds)), at.heads, at.batch
    values["AVERAGE"] = at.average
    return at.bound(kernel, others, grid, (threads, 1, 1), shapes, init_value, **values)


def _declared(kernel: str, values: Mapping[str, Any]) -> int:
    """Bytes of threadgroup memory that a kernel declares; on CUDA it asks for them instead."""
    return 0 if values["SHARED"] else memory(kernel, values, 1)


def memory(kernel: str, values: Mapping[str, Any], places: int) -> int:
    """Bytes of threadgroup memory that a kernel takes, by the values of its template.

    Args:
        kernel: as :func:`cut` has it.
        values: the template's values by name.
        places: of the gradients' tiles; 1 where no products are made together.
    """
    size, simds, tile, slices = values["T"].size, values["SIMDS"], values["TILE"], 1
    step, rows = 16 if places == 1 else 64, 16 * simds
    if kernel == "backward":
        slices = values["SLICES"]
        step, rows = max(step * slices, 16 * (rows // tile)), rows // slices
    width, v_width = (-(-values[name] // step) * step for name in ("D", "DV"))

    def of(rows: int, width: int) -> int:
        return tile_bytes(rows, width, size) if places == 1 else rows * width * size

    if kernel == "forward":
        return 2 * of(tile, width) + 3 * of(tile, v_width)
    wide = max(width, v_width)
    tiles = 2 * of(rows, wide) + 2 * places * of(tile, wide) + of(rows, tile)
    return tiles + 8 * places * tile
