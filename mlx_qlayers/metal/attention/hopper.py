"""Launches the attention kernels of Hopper GPUs. For NVIDIA GPUs alone, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...measurements.thresholds import row_of, tabled
from ...runtime.backend import use_backend
from ...runtime.devices import device_of
from ...runtime.launch import Bound, Size, TemplateValue
from ...runtime.spec import Spec
from ..common.kernels import strided_kernel, without
from .forward import Launcher, absent
from .layout import tile_bytes

_FILE = "attention/backward_once.metal"
_AHEAD = strided_kernel(
    "attention_forward_ahead",
    "attention/forward_ahead.metal",
    threadgroup_memory=lambda **values: _declared("forward", values),
)
_STATISTICS = strided_kernel("attention_backward_statistics", _FILE)
# The gradients of keys that heads share are sums as those of the queries.
_OF_KEYS = ("d_k", "d_v")
_ONCE = strided_kernel(
    "attention_backward_once",
    _FILE,
    atomic_outputs=True,
    threadgroup_memory=lambda **values: _declared("backward", values),
)
_ONCE_OF_GROUPS = without(_ONCE, _OF_KEYS, "attention_backward_once_of_groups")
_ROWS_OF_GROUPS = strided_kernel(
    "attention_backward_rows_of_groups", _FILE, function="attention_backward_rows"
)
_ROWS = without(_ROWS_OF_GROUPS, _OF_KEYS, "attention_backward_rows")


@dataclass(frozen=True)
class Cut:
    """How a kernel spreads its work."""

    # SIMD groups of a threadgroup, each with 16 queries forward and 16 keys backward.
    simds: int = 8
    tile: int = 64  # keys forward, queries backward that it looks at together
    # SIMD groups that share keys backward, each with its part of a tile's scores and columns.
    slices: int = 1
    kept: bool = False  # whether SIMD groups keep their keys and values in registers backward
    resident: int = 1  # threadgroups that a multiprocessor should have registers for

    def template(self, kernel: str, at: Launcher) -> dict[str, TemplateValue]:
        """The values of the template's last parameters."""
        values: dict[str, TemplateValue] = {"SIMDS": self.simds, "TILE": self.tile}
        if kernel == "backward":
            values |= {"SLICES": self.slices, "KEPT": self.kept}
        widths = {"T": at.q.dtype, "D": at.width, "DV": at.v_width}
        shared = memory(kernel, values | widths, True) if device_of(at.device).tensor_cores else 0
        return values | {"RESIDENT": self.resident, "SHARED": shared}


def cut(kernel: str, at: Launcher) -> Cut | None:
    """The configuration of ``"forward"`` or ``"backward"``, if these kernels take the call."""
    fits = at.q.dtype.size == 2 and not at.packing[1]
    if not fits or not device_of(at.device).warpgroup_products:
        return None
    scores = at.batch * at.heads * at.queries * at.keys
    size, excluded = (at.keys, False) if kernel == "forward" else (scores, at.deterministic)
    if excluded or size < tabled("attention_ahead_least", kernel, device="cuda"):
        return None
    table = tabled("attention_ahead", kernel, device="cuda")
    if (best := row_of(table, max(at.width, at.v_width))) is None:
        return None
    # Rows without a query would be computed too.
    return Cut(4) if kernel == "forward" and at.queries <= 64 else Cut(**best)


def forward_ahead(at: Launcher, chosen: Cut) -> Callable[..., list[mx.array]]:
    """The launch of :func:`.forward.attention_forward` as ``chosen`` spreads it."""
    return at.forward(_AHEAD, *_sizes(at, chosen, at.queries), **chosen.template("forward", at))


def backward_once(at: Launcher, chosen: Cut) -> Callable[..., list[mx.array]]:
    """Binds the gradients of q, k and v by atomics.

    The launch takes q, k, v, the broadcast mask, out, its cotangent, the norms, and the part of
    each value in queries that see no key. It gives d_q, d_k and d_v in the dtype of q, axes 1 and 2
    swapped, and the sums of the products of out and its cotangent (B, H, L) in float32.
    """
    dtype, rows = at.q.dtype, (at.batch, at.heads, at.queries)
    out, norms = Spec((*rows, at.v_width), dtype), Spec((*rows, 2), mx.float32)
    grouped = at.heads != at.kv_heads
    # Whole tiles, and on the host products need no more than 16 columns.
    step = 64 if device_of(at.device).tensor_cores else 16
    step = chosen.slices * max(step, 16 * (16 * chosen.simds // chosen.tile))
    width = -(-max(at.width, at.v_width) // step) * step
    of_queries, of_keys = (-(-n // 128) * 128 for n in (at.queries, at.keys))
    kv_heads = at.kv_heads if grouped else 0
    sums = Spec((at.batch, of_queries * at.heads + 2 * of_keys * kv_heads, width), mx.float32)
    keys = at.batch, at.keys, at.kv_heads
    shapes = [(*keys, at.width), (*keys, at.v_width)]
    d_q = at.batch, at.queries, at.heads, at.width
    prepare, finish = _around(
        *(at, out, norms, sums),
        (2 * max(of_queries, of_keys), at.heads + 2 * kv_heads, at.batch),
        [d_q, *shapes] if grouped else [d_q],
    )
    average = (at.batch, at.kv_heads, at.v_width) if at.average else absent().shape
    # A float holds two numbers of 16 bits.
    packed = [] if grouped else [(*keys, shape[-1] * dtype.size // 4) for shape in shapes]
    launch = at.bind(
        _ONCE_OF_GROUPS if grouped else _ONCE,
        [out, norms, Spec(average, mx.float32)],
        *_sizes(at, chosen, at.keys * chosen.slices),
        [sums.shape, *packed],
        init_value=0,
        **chosen.template("backward", at) | {"GROUPED": grouped, "AVERAGE": at.average},
    )

    def run(given: list[mx.array], *others: mx.array) -> list[mx.array]:
        out, d_out, norms, average = others
        (statistics,) = prepare([out, d_out, norms])
        sums, *of_keys = launch([*given, d_out, statistics, average, *at.ends])
        done = finish([sums, at.ends[0]])
        return [*done, *(a.view(dtype) for a in of_keys), statistics[..., 1]]

    return run


def _around(
    at: Launcher, out: Spec, norms: Spec, sums: Spec, grid: Size, shapes: Sequence[tuple[int, ...]]
) -> tuple[Bound, Bound]:
    """The launches ahead of the products, of their statistics, and behind them, of their sums."""
    values, grouped = {"T": at.q.dtype, "DV": at.v_width}, at.heads != at.kv_heads
    with use_backend(at.device):
        prepare = _STATISTICS.bind(
            [out, out, norms],
            template=values,
            grid=(-(-at.queries // 32) * 256, at.heads, at.batch),
            threadgroup=(256, 1, 1),
            output_shapes=[norms.shape],
        )
        finish = (_ROWS_OF_GROUPS if grouped else _ROWS).bind(
            [sums, Spec.of(at.ends[0])],
            template=values | {"D": at.width, "WIDTH": sums.shape[2], "GROUPED": grouped},
            grid=grid,
            threadgroup=(128, 1, 1),
            output_shapes=shapes,
        )
    return prepare, finish


def _sizes(at: Launcher, chosen: Cut, rows: int) -> tuple[Size, Size]:
    """The grid of as many threadgroups as own so many rows of all query heads, and theirs."""
    # Heads that run at the same time, those with the longest loops first, fit into L2.
    fits = max(1, (30 << 20) // (at.queries * (4 * at.width + 2 * (at.width + at.v_width))))
    beside = max(n for n in range(1, min(fits, at.heads) + 1) if at.heads % n == 0)
    threads = 32 * chosen.simds
    grid = threads * beside, -(-rows // (16 * chosen.simds)), at.heads // beside * at.batch
    return grid, (threads, 1, 1)


def _declared(kernel: str, values: Mapping[str, Any]) -> int:
    """Bytes of threadgroup memory that a kernel declares, if it does not ask for them instead."""
    return 0 if values["SHARED"] else memory(kernel, values, False)


def memory(kernel: str, values: Mapping[str, Any], warpgroup: bool) -> int:
    """Bytes of threadgroup memory by the values of the template."""
    size, simds, tile = values["T"].size, values["SIMDS"], values["TILE"]
    step, rows, slices = 64 if warpgroup else 16, 16 * simds, values.get("SLICES", 1)
    if kernel == "backward":
        step, rows = slices * max(step, 16 * (rows // tile)), rows // slices
    width, v_width = (-(-values[name] // step) * step for name in ("D", "DV"))

    def of(rows: int, width: int) -> int:
        return rows * width * size if warpgroup else tile_bytes(rows, width, size)

    if kernel == "forward":
        ahead = 2 if warpgroup else 1
        return (ahead + 1) * of(tile, width) + (ahead + 2) * of(tile, v_width) + 16
    wide = max(width, v_width)
    tiles = 2 * of(rows, wide) + (6 if slices == 1 else 4) * of(tile, wide) + 2 * of(rows, tile)
    return tiles + 16 * tile
