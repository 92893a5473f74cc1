"""Attention: random calls against float64, and calls as they should not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers import attention
from mlx_qlayers.metal.attention.decode import BITS
from tests import oracles
from tests.attention_cases import MASKS, make_mask, units
from tests.fuzz import arrays
from tests.fuzz.target import fuzz
from tests.numerics import assert_accurate, random, round_to, to64

WIDTHS = st.sampled_from([1, 7, 8, 32, 40, 64, 64, 72, 128, 256])


ATTENTION = st.builds(
    SimpleNamespace,
    seed=arrays.SEEDS,
    batch=st.sampled_from([1, 1, 1, 2, 3, 0]),
    heads=arrays.HEADS,
    queries=st.one_of(st.sampled_from([1, 1, 2, 8, 9]), st.integers(0, 70)),
    keys=st.one_of(st.sampled_from([1, 2, 31, 33, 64, 300]), st.integers(1, 130)),
    width=WIDTHS,
    v_width=WIDTHS,
    dtype=arrays.DTYPES,
    mask=st.sampled_from(MASKS),
    window=st.one_of(st.none(), st.none(), st.sampled_from([1, 2, 5, 64, 10**6, 2**31, 2**40])),
    softcap=st.sampled_from([None, None, 1e-3, 2.0, 30.0, 1e6]),
    sinks=st.booleans(),
    scale=st.sampled_from([0.125, 0.125, 1.0, 0.0, -0.5, 1e-8, 30.0]),
    packing=st.one_of(
        st.none(), st.none(), st.tuples(st.sampled_from([32, 64]), st.sampled_from([2, 4, 8]))
    ),
    values=st.sampled_from(["normal", "normal", "normal", "zeros", "tiny", "special"]),
    layouts=st.tuples(*[arrays.LAYOUTS] * 5),
    backend=arrays.BACKENDS,
    gradient=st.booleans(),
)


def _covered(case: SimpleNamespace) -> bool:
    """Whether a kernel takes such a call, so that ``host`` may be forced."""
    widths = case.width, case.v_width
    small = min(case.queries, case.batch) > 0
    few = case.queries <= 8 and all(w % 8 == 0 and w <= 256 for w in widths)
    few = few and (case.packing is None or case.packing[1] in BITS)
    many = all(w % 8 == 0 for w in widths) and case.width >= 32 and max(widths) <= 256
    sound = case.scale > 0
    return small and ((few and not case.gradient) or (many and sound))


@fuzz(ATTENTION)
def test_attention(case: SimpleNamespace) -> None:
    rng, dtype = np.random.default_rng(case.seed), arrays.dtype_of(case.dtype)
    backend = case.backend if case.backend in ("reference", "auto") or _covered(case) else "auto"
    (q, k, v), keys, options = _arguments(case, rng, dtype)
    if 0 in q.shape and case.packing:
        return
    names = ["q"] if case.packing else ["q", "k", "v"]
    names += ["sinks"] * case.sinks
    mask = options["mask"]
    names += ["mask"] * (isinstance(mask, mx.array) and mask.dtype != mx.bool_)
    inputs = [{"q": q, **keys, **options}[name] for name in names]

    def run(*operands: mx.array) -> list[mx.array]:
        return [attention(**{**keys, **options, **dict(zip(names, operands, strict=True))})]

    cotangent = random(rng, (*q.shape[:3], v.shape[3]), dtype)
    gradient = case.gradient and case.values == "normal" and not case.packing
    with arrays.running(backend):
        if gradient:
            (out,), gradients = mx.vjp(run, inputs, [cotangent])
        else:
            (out,), gradients, names = run(*inputs), [], []
        mx.eval(out, gradients)
    assert out.shape == cotangent.shape
    if out.size:
        found = dict(zip(["out", *names], [out, *gradients], strict=True))
        _compare(case, found, [q, k, v], options, cotangent if gradient else None)


def _arguments(
    case: SimpleNamespace, rng: np.random.Generator, dtype: mx.Dtype
) -> tuple[list[mx.array], dict[str, Any], dict[str, Any]]:
    """q, k and v as numbers, keys and values as they are passed, and the options."""
    (heads, kv_heads), (size, bits) = case.heads, case.packing or (1, 0)
    width, v_width = (-(-w // size) * size for w in (case.width, case.v_width))
    q = arrays.filled(rng, (case.batch, heads, case.queries, width), dtype, case.values)
    # The queries of which NaN or infinities are part are not compared.
    values = "normal" if case.values == "special" else case.values
    k = arrays.filled(rng, (case.batch, kv_heads, case.keys, width), dtype, values)
    v = arrays.filled(rng, (case.batch, kv_heads, case.keys, v_width), dtype, values)
    mask = make_mask(case.mask, rng, case.batch, heads, case.queries, case.keys, dtype)
    sinks = random(rng, (heads,), dtype) if case.sinks else None
    operands = zip((q, k, v, sinks), case.layouts, strict=False)
    q, k, v, sinks = (arrays.laid_out(a, layout) for a, layout in operands)
    if isinstance(mask, mx.array):
        mask = arrays.laid_out(mask, case.layouts[4])
    options = {
        "scale": case.scale,
        "window": case.window,
        "softcap": case.softcap,
        "mask": mask,
        "sinks": sinks,
    }
    keys: dict[str, Any] = {"k": k, "v": v}
    if bits and q.size:
        packed = {
            name: tuple(arrays.laid_out(a, layout) for a in mx.quantize(keys[name], size, bits))
            for name, layout in zip("kv", case.layouts[1:], strict=False)
        }
        k, v = (
            mx.dequantize(w, *(a.astype(mx.float32) for a in rest), group_size=size, bits=bits)
            for w, *rest in packed.values()
        )
        keys = packed
    return [q, k, v], keys, options


def _compare(
    case: SimpleNamespace,
    found: dict[str, mx.array],
    given: list[mx.array],
    options: dict[str, Any],
    cotangent: mx.array | None,
) -> None:
    dtype, mask = found["out"].dtype, options["mask"]
    plain = {n: to64(a) if isinstance(a, mx.array) else a for n, a in options.items()}
    if isinstance(mask, mx.array) and mask.dtype == mx.bool_:
        plain["mask"] = plain["mask"].astype(bool)
    operands, dy = [to64(a) for a in given], None if cotangent is None else to64(cotangent)
    with np.errstate(all="ignore"):
        of_kernel = units(dtype, case.packing is not None)
        truth, terms = oracles.attention(*operands, **plain, cotangent=dy, units=of_kernel)
        rough, _ = oracles.attention(*operands, **plain, cotangent=dy, dtype=np.float32)
    rows = (np.isfinite(operands[0]) & (np.abs(operands[0]) < 1e3)).all(-1, keepdims=True)
    for name, actual in found.items():
        assert actual.shape == truth[name].shape and actual.dtype == dtype
        sure = np.broadcast_to(rows if name == "out" else True, actual.shape)
        chosen = mx.array(to64(actual)[sure].astype(np.float32)).astype(dtype)
        exact, base = truth[name][sure], round_to(rough[name][sure], dtype)
        # What is below the normal numbers may be flushed to zero.
        if (np.abs(to64(chosen) - exact) > arrays.NORMAL[dtype]).any():
            most = terms[name][sure].max()
            assert_accurate(chosen, exact, base, terms=most, what=f"{name} of {case}")
