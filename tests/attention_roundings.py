"""The effect of roundings on attention and its gradients, to first order.

All is in units of float32's rounding. The roundings of a score move all weights of its query; the
roundings of different scores, weights and gradients are independent, so their squares add up.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# A rounding is spread evenly over its unit: half a unit is sqrt(3) standard deviations, and the
# policy's factor of 2 makes it 6 of them, so that none of 1e9 elements is beyond by chance.
SPREAD = 3**0.5


@dataclass(frozen=True)
class Units:
    """Roundings of what a kernel rounds on its way, in units of float32's."""

    # Of what products of matrices take, weights and gradients of scores; 0 in float32.
    operands: float = 0.0
    unpacked: float = 0.0  # of keys and values that were unpacked


@dataclass(frozen=True)
class Weights:
    """The intermediate results of attention; the sink is one more key, with the value zero."""

    q: np.ndarray  # all three of all query heads
    k: np.ndarray
    v: np.ndarray
    scale: float
    softcap: float | None
    raw: np.ndarray  # (B, H, L, S): products of q and k times the scale
    tanh: np.ndarray  # what the softcap makes of them
    capped: np.ndarray
    added: np.ndarray  # the mask, -inf where a key is hidden
    scores: np.ndarray  # (B, H, L, S + 1), as the weights: with those of the sink
    p: np.ndarray
    units: Units  # roundings

    @cached_property
    def scaled(self) -> np.ndarray:
        """Roundings of products of q and k, times the scale."""
        lost = self.units.unpacked * _root(self.q**2 @ self.k.swapaxes(-1, -2) ** 2)
        return np.abs(self.scale) * (_sizes(self.q, self.k) + lost) + 2 * np.abs(self.raw)

    @cached_property
    def slack(self) -> np.ndarray:
        """The square of each score's roundings times its weight.

        Bent, in units of log2, added, lowered by the largest, raised: two roundings each.
        """
        seen, top = np.isfinite(self.added), self.scores.max(-1, keepdims=True)
        of_keys = (1 - self.tanh**2) * self.scaled + 4 * np.abs(self.capped)
        of_keys = np.where(seen, of_keys, 0) + 2 * np.abs(np.where(seen, self.added, 0))
        sink = self.scores[..., -1:]
        of_sink = 2 * np.abs(np.where(np.isfinite(sink), sink, 0))
        lowered = 2 * np.where(np.abs(top) < 1e300, np.abs(top), 0) + 4
        return (self.p * (np.concatenate([of_keys, of_sink], -1) + lowered)) ** 2

    def of_out(self, out: np.ndarray) -> np.ndarray:
        """Roundings of the output, which is given, beyond those of its sum."""
        own, p = self.slack[..., :-1], self.p[..., :-1]
        moved = own @ self.v**2 - 2 * out * (own @ self.v)
        moved += out**2 * self.slack.sum(-1, keepdims=True)
        rounded = self.units.operands**2 + self.units.unpacked**2
        return SPREAD * (_root(moved) + _root(rounded * p**2 @ self.v**2))

    def of_weights(self) -> np.ndarray:
        """Squares of the roundings of the weights: (B, H, L, S)."""
        p, own = self.p[..., :-1], self.slack[..., :-1]
        moved = (1 - 2 * p) * own + p**2 * self.slack.sum(-1, keepdims=True)
        return SPREAD**2 * (np.maximum(moved, 0) + (self.units.operands * p) ** 2)

    def of_scores(
        self, d_out: np.ndarray, out: np.ndarray, d_p: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The gradients of scores, behind and before the softcap, and of q but for its sum.

        Returns:
            Squares of the roundings of the first two, (B, H, L, S + 1) and (B, H, L, S), and the
            roundings of the third.
        """
        p, bend, slack = self.p[..., :-1], 1 - self.tanh**2, self.slack
        mean = (p * d_p).sum(-1, keepdims=True)
        lever = np.concatenate([d_p - mean, -mean], -1)
        shared, tilt, tilts = ((slack * lever**i).sum(-1, keepdims=True) for i in range(3))
        behind = (1 - 4 * self.p) * slack * lever**2
        behind += self.p**2 * (lever**2 * shared + 2 * lever * tilt + tilts)
        behind = np.maximum(behind, 0)
        d_p_lost = self.units.unpacked * _root(d_out**2 @ self.v.swapaxes(-1, -2) ** 2)
        behind[..., :-1] += (p * d_p_lost) ** 2
        # The mean is made of an output, rounded like weights, or of the weights themselves.
        of_mean = ((d_out * out) ** 2).sum(-1, keepdims=True)
        of_mean = self.units.operands**2 * (of_mean + ((p * d_p) ** 2).sum(-1, keepdims=True))
        # Kernels make the weights anew by the norm that is stored: these need not add up to one.
        of_mean += (slack[..., :-1] * d_p**2).sum(-1, keepdims=True)
        # 1 - tanh**2 cancels where it is small.
        curved = 1 + 4 * self.tanh**2
        if self.softcap is not None:
            curved = curved + 2 * np.abs(self.tanh) * bend * self.scaled / self.softcap
        d_scores = p * lever[..., :-1] * bend
        rounded = (p * lever[..., :-1] * curved) ** 2 * (self.softcap is not None)
        rounded = rounded + (self.units.operands * d_scores) ** 2
        before = (behind[..., :-1] + of_mean * p**2) * bend**2 + rounded
        own = (slack * lever**2)[..., :-1] * bend**2 + rounded
        own += (self.units.unpacked * d_scores) ** 2 + (p * bend * d_p_lost) ** 2
        of_q = _root(own @ self.k**2) + _root(shared) * np.abs(d_scores @ self.k)
        of_q += _root(tilts + of_mean) * np.abs((p * bend) @ self.k)
        behind[..., :-1] += of_mean * p**2
        return SPREAD**2 * behind, SPREAD**2 * before, SPREAD * np.abs(self.scale) * of_q


def _root(squares: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(squares, 0))


def _sizes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of the absolute terms of ``a @ b.T``."""
    found: np.ndarray = np.abs(a) @ np.abs(b).swapaxes(-1, -2)
    return found
