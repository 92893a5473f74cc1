"""Multi-head attention as a module of its own, for training or with mlx-lm's caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.attention import attention
from ..ops.signature import Signature


class FusedAttention(nn.Module):
    """Projections, norms, rotary embedding and attention, with grouped heads.

    Parameters have mlx-lm's names: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and with
    ``qk_norm`` also ``q_norm`` and ``k_norm``.

    Args:
        dims: size of the input and of the output.
        num_heads: query heads, H.
        num_kv_heads: key and value heads, Hkv; H by default, and a divisor of it.
        head_dim: size of a head, D; ``dims / num_heads`` by default.
        bias: give all four projections a bias.
        rope: applied to queries and keys as ``rope(x, offset=...)``, such as ``nn.RoPE(D)``.
        window: sliding window, see :func:`mlx_qlayers.attention`.
        softcap: bound of the scores, see :func:`mlx_qlayers.attention`.
        qk_norm: normalize queries and keys per head before the rotary embedding, as Qwen3 does.
        deterministic: gradients are the same in each run, see :func:`mlx_qlayers.attention`.

    Raises:
        ValueError: a size or a count does not fit; it says which.

    Example:
        >>> layer = FusedAttention(64, 4, num_kv_heads=2, rope=nn.RoPE(16))
        >>> layer(mx.zeros((1, 10, 64)), mask="causal").shape
        (1, 10, 64)

    Source:
        Grouped-query attention, arXiv 2305.13245; mlx-lm's Qwen3.
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rope: nn.Module | None = None,
        window: int | None = None,
        softcap: float | None = None,
        qk_norm: bool = False,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        flags = bias, qk_norm, deterministic
        _TAKES.check(dims, num_heads, num_kv_heads, head_dim, window, softcap, *flags)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, not {num_kv_heads}")
        if head_dim is None and dims % num_heads:
            raise ValueError(f"dims must be a multiple of num_heads {num_heads}, not {dims}")
        head_dim = head_dim or dims // num_heads
        if rope is not None and not callable(rope):
            raise ValueError(f"rope must be called as rope(x, offset=...), which {rope!r} cannot")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.scale = head_dim**-0.5
        self.window, self.softcap, self.deterministic = window, softcap, deterministic
        self.q_proj = nn.Linear(dims, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dims, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dims, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, dims, bias=bias)
        if qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        if rope is not None:
            self.rope = rope

    def _extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"window={self.window}, softcap={self.softcap}"
        )

    def _heads(self, x: mx.array, count: int, norm: str) -> mx.array:
        x = x.reshape(*x.shape[:2], count, -1)
        return (self[norm](x) if norm in self else x).swapaxes(1, 2)

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None
    ) -> mx.array:
        """Attend within ``x`` and to what ``cache`` holds.

        Args:
            x: (B, L, dims), floating point.
            mask: see :func:`mlx_qlayers.attention`. Where it is None and the layer has a window,
                the cache makes the mask: only it knows the order and the padding of its keys.
            cache: one of mlx-lm's key-value caches, quantized or not; it is updated.

        Returns:
            (B, L, dims).

        Raises:
            ValueError: ``x`` does not have 3 axes, the mask does not fit, or the cache is none.
        """
        if not isinstance(x, mx.array) or x.ndim != 3:
            raise ValueError(f"x must be (B, L, dims), not {getattr(x, 'shape', x)}")
        if cache is not None and not hasattr(cache, "update_and_fetch"):
            raise ValueError(f"cache must be a key-value cache of mlx-lm, not {cache!r}")
        q = self._heads(self.q_proj(x), self.num_heads, "q_norm")
        k = self._heads(self.k_proj(x), self.num_kv_heads, "k_norm")
        v: Any = self._heads(self.v_proj(x), self.num_kv_heads, "")
        if "rope" in self:
            offset = 0 if cache is None else cache.offset
            q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        window = self.window
        if cache is not None:
            if window is not None and mask is None and hasattr(cache, "make_mask"):
                mask = cache.make_mask(x.shape[1], return_array=False, window_size=window)
            if hasattr(cache, "max_size"):  # Its keys are in no order that positions follow from.
                window = None
            k, v = cache.update_and_fetch(k, v)
        rule: dict[str, Any] = {"softcap": self.softcap, "deterministic": self.deterministic}
        out = attention(q, k, v, scale=self.scale, mask=mask, window=window, **rule)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))


_TAKES = Signature("""
    dims: int >= 1
    num_heads: int >= 1
    num_kv_heads: int >= 1
    head_dim: int >= 1 or None
    window: int >= 1 or None
    softcap: number > 0 or None
    bias: flag
    qk_norm: flag
    deterministic: flag
""")
