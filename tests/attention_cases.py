"""Inputs for attention on awkward shapes, and what float64 makes of them."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests import oracles
from tests.attention_roundings import Units
from tests.numerics import IN_FLOAT32, assert_accurate, assert_same_sums, random, round_to, to64

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
MASKS = ["none", "causal", "boolean", "padded", "additive", "biased", "one key"]
EXTRAS = [
    {},
    {"window": 5},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 9, "softcap": 30.0, "sinks": True},
]


def make_mask(kind, rng, batch, heads, queries, keys, dtype):
    if kind in ("none", "causal"):
        return None if kind == "none" else kind
    if kind in ("boolean", "dark"):
        seen = rng.random((queries, keys)) < 0.7
        seen[1:2] &= kind == "boolean"  # else a row that sees nothing
        return mx.array(seen)
    if kind == "padded":  # As batched generation: the first keys of some rows are hidden.
        return mx.array(np.arange(keys) >= rng.integers(0, keys, (batch, 1, 1, 1)))
    if kind == "one key":
        return mx.array(np.arange(keys) == rng.integers(0, keys, (1, heads, queries, 1)))
    if kind == "additive":
        return random(rng, (1, queries, keys), dtype)
    hidden = mx.array(rng.random((batch, heads, queries, keys)) < 0.3)
    if kind == "hidden":
        hidden[0, 0, 0] = True  # A row that sees nothing.
    return mx.where(hidden, -float("inf"), random(rng, hidden.shape, dtype)).astype(dtype)


def make(seed, shape, dtype, kind="none", extra=None):
    batch, heads, kv_heads, queries, keys, width, v_width = shape
    rng = np.random.default_rng(seed)
    q = random(rng, (batch, heads, queries, width), dtype)
    k = random(rng, (batch, kv_heads, keys, width), dtype)
    v = random(rng, (batch, kv_heads, keys, v_width), dtype)
    options = {"scale": width**-0.5, **(extra or {})}
    options["mask"] = make_mask(kind, rng, batch, heads, queries, keys, dtype)
    if options.get("sinks"):
        options["sinks"] = random(rng, (heads,), dtype)
    return rng, (q, k, v), options


def units(dtype: mx.Dtype, packed: bool = False) -> Units:
    """The roundings of kernels on their way: operands of products, and numbers of packed keys."""
    unit = IN_FLOAT32[dtype]
    return Units(unit if dtype != mx.float32 else 0.0, unit if packed else 0.0)


def expect(arrays, options, dtype, packed=False, **more):
    """By name: the truth, what float32 and one rounding make of it, the terms it is a sum of."""
    plain = {n: to64(o) if isinstance(o, mx.array) else o for n, o in options.items()}
    if isinstance(plain["mask"], np.ndarray) and options["mask"].dtype == mx.bool_:
        plain["mask"] = plain["mask"].astype(bool)
    plain |= more
    dense = [to64(a) if isinstance(a, mx.array) else a[0] for a in arrays]
    truth, terms = oracles.attention(*dense, **plain, units=units(dtype, packed))
    rough, _ = oracles.attention(*dense, **plain, dtype=np.float32)
    return {name: (truth[name], round_to(rough[name], dtype), terms[name]) for name in truth}


def check(
    attention: Callable[..., mx.array],
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    kind: str = "none",
    extra: dict[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Hold an attention function and all its gradients against float64."""
    rng, arrays, options = make(seed, shape, dtype, kind, extra)
    cotangent = random(rng, (*arrays[0].shape[:3], shape[-1]), dtype)
    expected = expect(arrays, options, dtype, cotangent=to64(cotangent))
    names = ["q", "k", "v"]
    names += ["sinks"] * ("sinks" in options)
    names += ["mask"] * ("mask" in expected)
    inputs = [*arrays, *(options[name] for name in names[3:])]

    def run(q: mx.array, k: mx.array, v: mx.array, *others: mx.array) -> list[mx.array]:
        chosen = {**options, **dict(zip(names[3:], others, strict=True))}
        return [attention(q, k, v, **chosen)]

    (out,), gradients = mx.vjp(run, inputs, [cotangent])
    for name, actual in zip(["out", *names], [out, *gradients], strict=True):
        assert actual.dtype == dtype
        truth, rounded, terms = expected[name]
        what = f"{name} of {shape} {kind} {extra}"
        assert_accurate(actual, truth, rounded, terms=terms, what=what)


def check_output(
    out: mx.array,
    arrays: Sequence[Any],
    options: dict[str, Any],
    what: str = "",
    *,
    packed: bool = False,
) -> None:
    """Hold a result against float64, and against float32 sums rounded once.

    Args:
        out: the result.
        arrays: q, k and v; of packed ones (the numbers,) in float64.
        options: those of the call.
        what: for the message.
        packed: whether k and v were, and a kernel rounds what they stand for.
    """
    truth, rounded, terms = expect(arrays, options, out.dtype, packed)["out"]
    assert out.dtype == arrays[0].dtype, what
    assert_accurate(out, truth, rounded, terms=terms, what=what)


def check_compiled(attention: Callable[..., mx.array], extra: dict[str, Any]) -> None:
    """Gradients of a compiled function are those of the function."""
    _, arrays, options = make(9, (1, 4, 2, 65, 65, 32, 32), mx.float32, "causal", extra)

    def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return (attention(q, k, v, **options) ** 2).sum()

    plain = mx.grad(loss, (0, 1, 2))(*arrays)
    compiled = mx.compile(mx.grad(loss, (0, 1, 2)))(*arrays)
    for one, two in zip(plain, compiled, strict=True):
        assert_same_sums(one, two)
