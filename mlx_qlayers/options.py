"""Arguments that an operation, its reference and its kernels share; the operation checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx


@dataclass(frozen=True)
class Sampling:
    """The options of :func:`mlx_qlayers.grid_sample`."""

    mode: str = "bilinear"
    padding_mode: str = "zeros"
    align_corners: bool = False
    deterministic: bool = False


class Rotation(NamedTuple):
    """How a rotary embedding turns, as ``mx.fast.rope`` takes it.

    Attributes:
        dims: leading elements of a head that are turned; even.
        traditional: turn neighbours, not elements half of ``dims`` apart.
        base: element i turns by ``base ** (-2 i / dims)`` a position; None with frequencies.
        scale: of positions.
    """

    dims: int
    traditional: bool = False
    base: float | None = 10000.0
    scale: float = 1.0


class Scores(NamedTuple):
    """What becomes of the products of queries and keys.

    Attributes:
        scale: what they are multiplied by.
        causal: whether a query sees no key that comes after it.
        window: how many keys a query sees, itself included, or None.
        softcap: the bound of the scores, or None.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None


class AttentionCall(NamedTuple):
    """The arguments of :func:`mlx_qlayers.attention`, arrays or their specs.

    Attributes:
        q: (B, H, L, D).
        k: keys (B, Hkv, S, D), or packed, scales and biases.
        v: values (B, Hkv, S, Dv), likewise.
        scores: the options.
        mask: that broadcasts to (B, H, L, S), or None.
        sinks: (H,) or None.
    """

    q: Any
    k: tuple[Any, ...]
    v: tuple[Any, ...]
    scores: Scores
    mask: Any = None
    sinks: Any = None

    @property
    def packing(self) -> tuple[int, int]:
        """Group size and bits of keys and values; zeros where they are not packed."""
        return packing(self.k, self.q.shape[3]) if len(self.k) > 1 else (0, 0)

    @property
    def v_width(self) -> int:
        """The width of a value."""
        words, bits = self.v[0].shape[3], self.packing[1]
        return 32 * words // bits if bits else int(words)

    @property
    def dtypes(self) -> list[mx.Dtype]:
        """Those of q, k and v; of packed ones those of scales and biases."""
        return [a.dtype for a in (self.q, *self.k, *self.v) if a.dtype != mx.uint32]


def packing(k: tuple[Any, ...], width: int) -> tuple[int, int]:
    """The group size and the bits with which rows of ``width`` numbers are packed."""
    return width // k[1].shape[-1], 32 * k[0].shape[-1] // width
