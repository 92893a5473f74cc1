"""A step of decoding whose graph does not depend on how many keys a cache holds, for traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..dispatch import Choice, Operation, Plan, choose, dispatch, gradient_of
from ..dispatch.choice import unmeasured
from ..dispatch.measurements import configure, found
from ..metal.attention import step as kernels
from ..metal.attention.decode import BITS
from ..options import UNPACKED, Packing, Rotation, StepCall, row_words
from ..reference import attention_step as reference
from ..reference.attention_step import packed_rows, parts_of_rows
from ..runtime import proof
from ..runtime.devices import device_of
from ..runtime.spec import Spec
from .attention_checks import check_packed, check_rotation
from .signature import Signature

__all__ = [
    "MIN_POSITIONS",
    "MIN_SEMAPHORES",
    "Rotation",
    "attention_step",
    "packed_rows",
    "parts_of_rows",
    "why_not",
]

_MAX_WIDTH = 256
# Tokens of a sequence at most, as of a graph.
MAX_TOKENS = 16
# Elements of `positions` and `semaphores` at least: MLX passes fewer in another address space.
MIN_POSITIONS = MIN_SEMAPHORES = 8


def attention_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    k_cache: mx.array | tuple[mx.array, mx.array, mx.array],
    v_cache: mx.array | tuple[mx.array, mx.array, mx.array],
    k_append: mx.array,
    v_append: mx.array,
    positions: mx.array,
    *,
    scale: float,
    rotation: Rotation,
    freqs: mx.array | None = None,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    norms: tuple[mx.array, mx.array] | None = None,
    epsilon: float = 1e-5,
    semaphores: mx.array | None = None,
) -> list[mx.array]:
    """Rotary embedding and attention to a cache and its append buffer, for a step of decoding.

    The cache is only read. Each step writes the append buffer, which holds the keys and values
    that came since the cache was written. Their number is in an array, so that ``mx.compile``
    traces a step of decoding once for many, until the cache has to grow.

    Args:
        q: (B, L, H * D) in float32, float16 or bfloat16: the product, before its rotation, of 1 to
            16 tokens of each sequence. A token sees those before it in the step.
        k: (B, L, Hkv * D) in the dtype of ``q``.
        v: (B, L, Hkv * Dv).
        k_cache: (B, Hkv, S, D); or what ``mx.quantize`` gives of it, (packed, scales, biases),
            with scales in the dtype of ``q``. Then keys and values of the tokens are packed like
            it, and attended to as they are then.
        v_cache: (B, Hkv, S, Dv), or packed with the group size of ``k_cache``.
        k_append: (B, Hkv, R, D); of packed keys what :func:`packed_rows` gives.
        v_append: (B, Hkv, R, Dv), likewise.
        positions: (8 or more,) int32: how many keys of the cache count, from 0 to S; how many of
            the append buffer, from 0 to R - L; the position of each sequence's first token;
            anything.
        scale: what the products of queries and keys are multiplied by.
        rotation: how queries and keys are rotated; ``dims`` 0 rotates nothing.
        freqs: (dims / 2,) the reciprocals of what pairs rotate by, if ``rotation.base`` is None.
        mask: booleans, true where a token sees a key; (B or 1, H or 1, 1, S or more), of which
            column j is that of key j: those of the cache that count, those of the append buffer,
            and the tokens' own. None hides nothing.
        sinks: (H,) scores of keys without a value, one a head, in the dtype of ``q`` or cast to it.
        norms: (D,) each, in the dtype of ``q`` or cast to it: the weights of RMS norms that each
            head of queries and keys goes through first. None normalizes nothing.
        epsilon: of these norms.
        semaphores: (max(8, B * L * H),) int32 zeros for split-K, with which a GPU needs one launch,
            not two. They are zeros again behind it: give them to no call that may run at once.

    Returns:
        (B, L, H * Dv), the heads side by side; and both append buffers with the tokens' keys and
        values from row ``positions[1]`` on, and zeros behind them.

    Raises:
        ValueError: a shape, a dtype or a number does not fit; it is named.

    Example:
        >>> x, cache, last = mx.ones((1, 1, 64)), mx.ones((1, 2, 256, 32)), mx.ones((1, 2, 16, 32))
        >>> arrays = x, x, x, cache, cache, last, last, mx.array([256, 7, 263, 0, 0, 0, 0, 0])
        >>> [y.shape for y in attention_step(*arrays, scale=1.0, rotation=Rotation(32))]
        [(1, 1, 64), (1, 2, 16, 32), (1, 2, 16, 32)]

    Source: :func:`mlx_qlayers.ops.rotary.rotary_embedding` and :func:`mlx_qlayers.attention`.
    """
    many = tuple, list
    of_k = k_cache if isinstance(k_cache, many) else (k_cache,)
    of_v = v_cache if isinstance(v_cache, many) else (v_cache,)
    if norms is not None and (not isinstance(norms, many) or len(norms) != 2):
        raise ValueError(f"norms must be two arrays, or None, not {norms!r}")
    weights = (None, None) if norms is None else norms
    rest = positions, freqs, mask, sinks, *weights, semaphores
    arrays = q, k, v, *of_k, *of_v, k_append, v_append, *rest
    static = scale, rotation, 0.0 if norms is None else epsilon, len(of_k), len(of_v)
    return dispatch(ATTENTION_STEP, arrays, static)


def _plan(
    arrays: Sequence[Any], scale: float, rotation: Rotation, epsilon: float, *parts: int
) -> Plan:
    if parts not in ((1, 1), (3, 3)):
        what = f"{parts[0]} and {parts[1]} arrays"
        raise ValueError(f"k_cache and v_cache must be packed in 3 arrays each, or 1, not {what}")
    if arrays[0].ndim == 3 and (arrays[3].dtype == mx.uint32) != (parts == (3, 3)):
        raise ValueError(f"k_cache must be {arrays[0].dtype}, or packed, not {arrays[3].dtype}")
    call = _checked(arrays)
    q, (batch, kv_heads, size, _) = call.q, call.k_cache[0].shape
    width, v_width, bits = call.width, call.v_width, call.packing[1]
    _NUMBERS.check(scale, epsilon)
    scale, epsilon = float(scale), float(epsilon)  # MLX takes no larger integers than int64
    check_rotation(rotation, call.freqs, width)
    share, shape = q.shape[2] // (kv_heads * width), (batch, kv_heads, size, width)
    choice = _choose(_Asked(q.dtype, share, shape, v_width, call.packing, q.shape[1]))
    composed = reference.attention_step(arrays, scale, rotation, epsilon)
    if choice.path == "reference":
        return Plan(choice, composed)
    key = kernels.key_of(q, Spec(shape, q.dtype), v_width, call.packing)
    config = configure("attention_step", choice.path, *key)
    known = arrays if device_of(choice.path).orders_threadgroups else arrays[:-1]
    launch = kernels.attention_step(known, scale, rotation, config, epsilon)
    if bits:
        return Plan(choice, launch, reference=composed)
    return Plan(choice, launch, gradient_of(composed, arrays), composed)


def _sample(arrays: list[Any], *static: Any) -> list[Any]:
    """A cache that is full but for a row, and an append buffer that is half full."""
    call = StepCall.of(arrays)
    size, tokens = call.k_cache[0].shape[2] - 1, call.q.shape[1]
    rows = (call.k_append.shape[2] - tokens + 1) // 2
    if call.mask is not None:  # which has a column for each key
        rows = max(min(rows, (call.mask.shape[3] - tokens + 1) // 2), 0)
        size = min(size, max(call.mask.shape[3] - tokens - rows, 0))
    positions = mx.array([size, rows, *[size + rows] * (call.positions.size - 2)], mx.int32)
    appended: list[Any] = [call.k_append, call.v_append]
    if call.packing[1]:
        shapes = [
            (*beside.shape[:3], n)
            for beside, n in zip(appended, (call.width, call.v_width), strict=True)
        ]
        dense = [mx.random.normal(shape).astype(call.q.dtype) for shape in shapes]
        size, *bits = call.packing
        pairs = zip(dense, bits, strict=True)
        appended = [packed_rows(mx.quantize(each, size, n)) for each, n in pairs]
    freqs = None if call.freqs is None else 1 + mx.abs(call.freqs)
    semaphores = None if call.semaphores is None else mx.zeros_like(call.semaphores)
    behind = call.mask, call.sinks, call.q_norm, call.k_norm, semaphores
    return [*call[:3], *call.k_cache, *call.v_cache, *appended, positions, freqs, *behind]


_NUMBERS = Signature("scale: number\nepsilon: number")
ATTENTION_STEP = Operation("attention_step", _plan, sample=_sample)


class _Asked(NamedTuple):
    """The key of a choice: a cache (B, Hkv, S, D), values' width, tokens of each sequence."""

    dtype: mx.Dtype
    share: int
    k_shape: tuple[int, ...]
    v_width: int
    packing: Packing = UNPACKED
    tokens: int = 1

    @property
    def covered(self) -> bool:
        """Whether there is a kernel."""
        width, v_width, bits = self.k_shape[3], self.v_width, {*self.packing[1:]}
        whole = width % 8 == v_width % 8 == 0 and bits <= {0, *BITS}
        if not whole or max(width, v_width) > _MAX_WIDTH or not min(*self.k_shape, v_width):
            return False
        heads = kernels.Heads(self.dtype, width, v_width, self.packing.widest, self.tokens)
        return kernels.covers(self.share, heads, device_of().few_registers)


def why_not(*asked: Any) -> str | None:
    """Why the kernel should not be used here, if so: for what the fields of a choice's key are."""
    if not _Asked(*asked).covered:
        return "no kernel for these shapes"
    choice = _choose(_Asked(*asked))
    return choice.reason if choice.path == "reference" else None


def _choose(asked: _Asked) -> Choice:
    """The kernel, unless the stock operators were measured to be faster."""
    if not asked.covered:
        return choose("attention_step", False)
    dtype, share, k_shape, v_width, packing, _ = asked
    failed = proof.failed("attention_step") if device_of().needs_proof else None
    # Several tokens go by a measurement of one: both read the same keys.
    q = Spec((k_shape[0], 1, share * k_shape[1] * k_shape[3]), dtype)
    best = found("attention_step", *kernels.key_of(q, Spec(k_shape, dtype), v_width, packing))
    if failed or not device_of().gpu:  # a CPU decodes by attention to rows
        best = None
    by = f"attention_step_packed, {packing.bits} bits" if packing.bits else ""
    return choose("attention_step", reason=failed or unmeasured(), by=by, best=best)


def _takes(cache: str, k: str, v: str, k_append: str, v_append: str) -> Signature:
    """The arguments, with caches and append buffers of a dtype and in rows of so many words."""
    return Signature(f"""
        q: float (B, L, N); 1 <= L <= {MAX_TOKENS}
        k_cache: {cache} (B, Hkv, S, {k}); Hkv * D > 0 and N > 0 and N % (Hkv * D) == 0
        v_cache: {cache} (B, Hkv, S, {v}); Dv > 0
        the scales of k_cache: q or None
        the scales of v_cache: q or None
        k: q (B, L, Hkv * D)
        v: q (B, L, Hkv * Dv)
        k_append: {cache} (B, Hkv, R, {k_append}); R >= L
        v_append: {cache} (B, Hkv, R, {v_append})
        positions: int32 (P,); P >= {MIN_POSITIONS} and P >= 2 + B
        semaphores: int32 (T,) or None
        sinks: float (N // D,) or None
        q_norm: float (D,) or None
        k_norm: float (D,) or None
        mask: bool (1|B, 1|N // D, 1, M) or None; M >= S
""")


_PLAIN, _PACKED = _takes("q", "D", "Dv", "D", "Dv"), _takes("uint32", "Wk", "Wv", "Tk", "Tv")


def _checked(arrays: Sequence[Any]) -> StepCall:
    """The arguments by their names, after a check."""
    call, takes, known = StepCall.of(arrays), _PLAIN, dict[str, int]()
    (k_cache, *k_groups), (v_cache, *v_groups) = call.k_cache, call.v_cache
    if k_groups:
        three = {call.k.ndim, call.v.ndim} == {3} and call.k.size > 0 and call.v.size > 0
        if not three or k_cache.ndim != 4 or not k_cache.shape[1]:
            what = f"{call.k.shape} and {call.v.shape}"
            raise ValueError(f"k and v must be (B, L, Hkv * D), not {what}")
        check_packed("k_cache", call.k_cache, call.width)
        check_packed("v_cache", call.v_cache, call.v_width, call.packing[:2])
        appended = (row_words(each) for each in (call.k_cache, call.v_cache))
        takes = _PACKED
        known = dict(
            zip(("D", "Dv", "Tk", "Tv"), (call.width, call.v_width, *appended), strict=True)
        )
    groups = (k_groups or [None])[0], (v_groups or [None])[0]
    behind = call.positions, call.semaphores, call.sinks, call.q_norm, call.k_norm, call.mask
    given = call.q, k_cache, v_cache, *groups, call.k, call.v, call.k_append, call.v_append, *behind
    takes.check(*given, **known)
    return call
