"""Arguments that an operation, its reference and its kernels share; the operation checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from .formats import Format


@dataclass(frozen=True)
class Sampling:
    """The options of :func:`mlx_qlayers.grid_sample`."""

    mode: str = "bilinear"
    padding_mode: str = "zeros"
    align_corners: bool = False
    deterministic: bool = False


class Deformable(NamedTuple):
    """The options of :func:`mlx_qlayers.deformable_attention`."""

    shapes: tuple[tuple[int, int], ...]  # height and width of each level
    padding_mode: str = "zeros"  # `"zeros"` or `"border"`
    pixels: bool = False  # locations count the centres of pixels from 0; else they go from 0 to 1


class Rotation(NamedTuple):
    """How a rotary embedding rotates, as ``mx.fast.rope`` takes it.

    Attributes:
        dims: leading elements of a head that are rotated; even.
        traditional: rotate neighbours, not elements half of ``dims`` apart.
        base: pair i rotates by ``base ** (-2 i / dims)`` a position; None with frequencies.
        scale: of positions.
    """

    dims: int
    traditional: bool = False
    base: float | None = 10000.0
    scale: float = 1.0


# Numbers of logits that experts are chosen by.
SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logits", "sparsemixer")


class Router(NamedTuple):
    """How a row chooses experts by its logits.

    Experts have scores, and numbers to be chosen by: the scores and a bias.

    Attributes:
        top_k: experts of a row, J: those with the largest numbers.
        score: one of ``SCORES``, of all logits of a row. ``"logits"`` are chosen from as they are,
            and the weights are a softmax of the chosen ones. Nor are those of ``"sparsemixer"``:
            the weight of each is a softmax of the logits that were not chosen before it, without
            those that are lower by more than ``epsilon`` times the larger of it and their size.
        groups: the experts are so many groups of the same size, one after the other.
        dropped: so many groups, the lowest, have the number ``fill`` instead.
        pairs: a group is as high as the sum of its two largest numbers, else as its largest.
        fill: see above.
        masked: ``fill`` takes the place of scores too.
        last: of equal numbers the last is chosen, else the first.
        normed: scores are divided by the sum of the chosen ones.
        epsilon: that sum is larger by this.
        floor: and at least this.
        scale: of the result.
        dtype: of the result.
    """

    top_k: int
    score: str = "softmax"
    groups: int = 1
    dropped: int = 0
    pairs: bool = True
    fill: float = 0.0
    masked: bool = False
    last: bool = False
    normed: bool = True
    epsilon: float = 0.0
    floor: float = 0.0
    scale: float = 1.0
    dtype: mx.Dtype = mx.float32


class Clipped(NamedTuple):
    """``(clip(up, -limit, limit) + shift) * g * sigmoid(alpha * g)``, g = ``min(gate, limit)``."""

    limit: float = float("inf")
    alpha: float = 1.0
    shift: float = 0.0


class PackedMatrix(NamedTuple):
    """A quantized matrix that rows are multiplied with, and what is added to the product.

    Attributes:
        w: (N, K * bits / 32) uint32.
        scales: (N, K / group_size), floating point (affine) or uint8.
        biases: as ``scales`` (affine), else None.
        bias: (N,) in the dtype of the rows, or None.
    """

    w: Any
    scales: Any
    biases: Any = None
    bias: Any = None


class MatmulCall(NamedTuple):
    """A product of rows with a quantized matrix, by specs: ``x @ w.T`` or ``x @ w``, and a bias."""

    x: Any  # (..., K) in the dtype of the result; M rows
    matrix: PackedMatrix  # as that says if `transpose`, else (K, N) packed likewise
    transpose: bool  # multiply with the transpose of the packed matrix
    fmt: Format  # group_size, bits and mode of the matrix

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, N and K."""
        x, w = self.x, self.matrix.w
        return prod(x.shape[:-1]), w.shape[0] if self.transpose else self.fmt.dims(w), x.shape[-1]


class Scores(NamedTuple):
    """The options that change the products of queries and keys."""

    scale: float  # what they are multiplied by
    causal: bool = False  # whether a query sees no key that comes after it
    window: int | None = None  # how many keys a query sees, itself included, or None
    softcap: float | None = None  # the bound of the scores, or None
    deterministic: bool = False  # whether gradients are bit-identical from run to run


class Packing(NamedTuple):
    """How the keys and values of a cache are packed: a group size, and bits of either."""

    group_size: int = 0
    bits: int = 0
    v_bits: int = 0

    @property
    def widest(self) -> int:
        """The bits of both by which kernels are configured; those of fewer are held as 4."""
        return self.bits and max(*self[1:], 4)


UNPACKED = Packing()


class RotatedRows(tuple[mx.array, ...]):
    """Packed keys or values of heads that went through :func:`.reference.hadamard.rotated_heads`.

    Queries have to go through it too before they meet keys, and what attention gives behind it.
    """


class AttentionCall(NamedTuple):
    """The arguments of :func:`mlx_qlayers.attention`, arrays or their specs."""

    q: Any  # (B, H, L, D)
    k: tuple[Any, ...]  # keys (B, Hkv, S, D), or packed, scales and biases
    v: tuple[Any, ...]  # values (B, Hkv, S, Dv), likewise
    scores: Scores  # the options
    mask: Any = None  # that broadcasts to (B, H, L, S), or None
    sinks: Any = None  # (H,) or None

    @property
    def packing(self) -> Packing:
        """How keys and values are packed; zeros where they are not."""
        if len(self.k) == 1:
            return UNPACKED
        size, bits = packing(self.k, self.q.shape[3])
        return Packing(size, bits, packing(self.v, self.v_width)[1])

    @property
    def v_width(self) -> int:
        """The width of a value, which has groups as large as a key's."""
        if len(self.v) == 1:
            return int(self.v[0].shape[3])
        return int(self.v[1].shape[3] * packing(self.k, self.q.shape[3])[0])

    @property
    def dtypes(self) -> list[mx.Dtype]:
        """Those of q, k and v; of packed ones those of scales and biases."""
        return [a.dtype for a in (self.q, *self.k, *self.v) if a.dtype != mx.uint32]


class StepCall(NamedTuple):
    """The arrays of :func:`.ops.attention_step.attention_step`, or their specs."""

    q: Any
    k: Any
    v: Any
    k_cache: tuple[Any, ...]  # (B, Hkv, S, D), or packed, scales and biases
    v_cache: tuple[Any, ...]
    k_append: Any  # in rows of numbers or of :func:`row_words`
    v_append: Any
    positions: Any
    freqs: Any = None
    mask: Any = None
    sinks: Any = None
    q_norm: Any = None
    k_norm: Any = None
    semaphores: Any = None

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> StepCall:
        """That of arrays in turn, of caches each of one array or of three."""
        each = 3 if arrays[3].dtype == mx.uint32 else 1
        k, v, rest = arrays[3 : 3 + each], arrays[3 + each : 3 + 2 * each], arrays[3 + 2 * each :]
        q, key, value = arrays[:3]
        return cls(q, key, value, tuple(k), tuple(v), *rest)

    @property
    def width(self) -> int:
        """The width of a key."""
        return int(self.k.shape[2]) // int(self.k_cache[0].shape[1])

    @property
    def v_width(self) -> int:
        """The width of a value."""
        return int(self.v.shape[2]) // int(self.v_cache[0].shape[1])

    @property
    def packing(self) -> Packing:
        """How keys and values are packed; zeros where they are not."""
        if len(self.k_cache) == 1:
            return UNPACKED
        size, bits = packing(self.k_cache, self.width)
        return Packing(size, bits, packing(self.v_cache, self.v_width)[1])


def row_words(packed: Sequence[Any]) -> int:
    """The words of a row of packed numbers, its scales and its biases, filled up to eights."""
    words, scales, _ = packed
    used = words.shape[-1] + 2 * scales.shape[-1] * scales.dtype.size // words.dtype.size
    return int(-(-used // 8) * 8)


def packing(k: tuple[Any, ...], width: int) -> tuple[int, int]:
    """The group size and the bits with which rows of ``width`` numbers are packed."""
    return width // k[1].shape[-1], 32 * k[0].shape[-1] // width
