"""A step of decoding: random calls against float64, and calls that are wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.ops.attention_step import Rotation, attention_step
from tests import oracles
from tests.attention_cases import units
from tests.fuzz import arrays
from tests.fuzz.target import fuzz
from tests.numerics import IN_FLOAT32, ROUNDINGS, assert_accurate, random, round_to, to64


@fuzz(
    st.builds(
        SimpleNamespace,
        seed=arrays.SEEDS,
        batch=st.sampled_from([1, 1, 2, 3, 9]),
        heads=arrays.HEADS,
        size=st.sampled_from([1, 2, 7, 33, 64, 256, 1030]),
        rows=st.sampled_from([1, 2, 9, 64, 256]),
        filled=st.tuples(*[st.sampled_from([0.0, 0.3, 0.7, 1.0])] * 2),
        width=st.sampled_from([8, 32, 40, 64, 128, 256]),
        v_width=st.sampled_from([8, 32, 40, 64, 128, 256]),
        masked=st.booleans(),
        dims=st.integers(0, 128).map(lambda n: 2 * n),
        traditional=st.booleans(),
        base=st.sampled_from([None, 1.5, 500.0, 10000.0, 1e6]),
        rope_scale=st.sampled_from([1.0, 0.25, 4.0]),
        dtype=arrays.DTYPES,
        layouts=st.tuples(*[arrays.LAYOUTS] * 8),
        backend=arrays.BACKENDS,
    )
)
def test_attention_step(case: SimpleNamespace) -> None:
    rng, dtype = np.random.default_rng(case.seed), arrays.dtype_of(case.dtype)
    heads, kv_heads = case.heads
    width, v_width = case.width, case.v_width
    dims = min(case.dims, width)
    before, held = (
        int(f * n) for f, n in zip(case.filled, (case.size, case.rows - 1), strict=True)
    )
    q = random(rng, (case.batch, 1, heads * width), dtype)
    k, v = (random(rng, (case.batch, 1, kv_heads * n), dtype) for n in (width, v_width))
    sizes = [(count, n) for count in (case.size, case.rows) for n in (width, v_width)]
    buffers = [random(rng, (case.batch, kv_heads, *size), dtype) for size in sizes]
    freqs = random(rng, (dims // 2,)) if case.base is None else None
    freqs = None if freqs is None else mx.abs(freqs) * 50 + 1
    *operands, freqs = (
        arrays.laid_out(a, layout)
        for a, layout in zip((q, k, v, *buffers, freqs), case.layouts, strict=True)
    )
    places = [before, held, *rng.integers(0, 3000, case.batch).tolist()]
    positions = mx.array([*places, *[-1] * 8], mx.int32)
    mask = None
    if case.masked:
        columns = np.arange(case.size + case.rows)
        shown = rng.random((case.batch, 1, 1, columns.size)) < 0.7
        mask = mx.array(shown | (columns == before + held))
    rotation = Rotation(dims, case.traditional, case.base, case.rope_scale)
    with arrays.running(case.backend):
        out, *made = attention_step(
            *operands, positions, scale=width**-0.5, rotation=rotation, freqs=freqs, mask=mask
        )
        mx.eval(out, made)
    exact = _stepped(case, operands, places, rotation, freqs, mask, np.float64, None)
    rough = _stepped(case, operands, places, rotation, freqs, mask, np.float32, dtype)
    # MLX's own rotary embedding computes angles in float32.
    by_stock = case.backend in ("reference", "auto") and dims > 0
    roundings = ROUNDINGS[dtype] * IN_FLOAT32[dtype]
    angle = roundings + 4 * max(places[2:]) * case.rope_scale
    turned = angle * by_stock * (np.abs(to64(operands[1])).max() + np.abs(to64(operands[0])).max())
    of_out = exact[3] * (1 + turned)
    results = zip([out, *made], exact[:3], rough[:3], [of_out, turned, 0.0], strict=True)
    for number, (actual, truth, base, terms) in enumerate(results):
        what = f"result {number} of {case}"
        assert_accurate(actual, truth, round_to(base, dtype), terms=terms, what=what)


def _stepped(
    case: SimpleNamespace,
    operands: list[mx.array],
    places: list[int],
    rotation: Rotation,
    freqs: mx.array | None,
    mask: mx.array | None,
    dtype: type,
    precision: mx.Dtype | None,
) -> tuple[Any, ...]:
    from tests.ops.test_rotary import turned

    q, k, v, *buffers = (to64(a).astype(dtype) for a in operands)
    batch, kv_heads, _, _ = buffers[0].shape
    before, held, *at = places
    parts = [
        x.reshape(batch, 1, n, -1)
        for x, n in zip((q, k, v), (case.heads[0], kv_heads, kv_heads), strict=True)
    ]
    options: dict[str, Any] = {"traditional": rotation.traditional, "scale": rotation.scale}
    options |= {"base": rotation.base, "freqs": freqs, "dtype": dtype}
    heads = [turned(mx.array(x.astype(np.float32)), at, rotation.dims, **options)
             if rotation.dims else x.swapaxes(1, 2) for x in parts[:2]]  # fmt: skip
    if precision is not None:
        heads = [to64(round_to(x, precision)).astype(dtype) for x in heads]
    appended, whole = [], []
    new = heads[1], parts[2].swapaxes(1, 2)
    for cache, beside, row in zip(buffers[:2], buffers[2:], new, strict=True):
        made = np.zeros_like(beside)
        made[:, :, :held], made[:, :, held : held + 1] = beside[:, :, :held], row
        appended.append(made)
        whole.append(np.concatenate([cache[:, :, :before], made[:, :, : held + 1]], axis=2))
    seen = None if mask is None else np.array(mask)[..., : before + held + 1]
    # Rotated rows are rounded, as unpacked ones are.
    found, terms = oracles.attention(
        heads[0], *whole, case.width**-0.5, seen, dtype=dtype, units=units(operands[0].dtype, True)
    )
    return found["out"].reshape(batch, 1, -1), *appended, terms.get("out", np.zeros(1)).max()
