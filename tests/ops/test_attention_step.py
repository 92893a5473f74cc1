"""A step of decoding against float64: rotation, the new append buffer, attention to both."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import mlx_qlayers.ops.attention_step as step
from mlx_qlayers import explain, use_backend
from mlx_qlayers.metal.attention.step import Step
from mlx_qlayers.ops.attention_step import Rotation, attention_step, packed_rows, why_not
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.backend import advance_epoch
from mlx_qlayers.runtime.host import checks
from tests import oracles
from tests.gpus import GPUS
from tests.machine import has_device
from tests.numerics import assert_accurate, assert_same_sums, random, round_to, to64

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
FREQS = mx.array(np.random.default_rng(9).uniform(1, 100, 16).astype(np.float32))
# B, H, Hkv, S, R, D, Dv, keys in the cache and the append buffer, first axes of a mask, rotation.
CASES = [
    (1, 4, 2, 40, 17, 64, 64, 17, 9, None, Rotation(64)),
    (2, 7, 1, 64, 16, 128, 128, 0, 0, (2, 1), Rotation(128, traditional=True)),
    (1, 3, 3, 34, 5, 40, 72, 34, 4, (1, 3), Rotation(32, base=None)),
    (1, 2, 1, 2100, 256, 192, 128, 1900, 180, None, Rotation(0)),
    (3, 18, 2, 700, 30, 32, 256, 300, 29, (3, 1), Rotation(24, scale=0.25)),
    (9, 5, 1, 2, 1, 8, 16, 1, 0, None, Rotation(8, base=500.0)),
]


@pytest.fixture(params=["reference", "host", "checked", *GPUS], autouse=True)
def path(request):
    """The reference, the fast and the checked build of the host backend, and GPUs."""
    name = "host" if request.param == "checked" else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield request.param


def make(case, dtype, path="reference"):
    """Random arrays and options; where nothing is held there is NaN, if the kernel reads it."""
    batch, heads, kv_heads, size, rows, width, v_width, before, held, axes, rotation = case
    rng, length = np.random.default_rng(width + before), before + held
    q = random(rng, (batch, 1, heads * width), dtype)
    k, v = (random(rng, (batch, 1, kv_heads * n), dtype) for n in (width, v_width))
    buffers = []
    for count, counted in ((size, before), (rows, held)):
        for n in (width, v_width):
            buffers.append(random(rng, (batch, kv_heads, count, n), dtype))
            if path != "reference":
                buffers[-1][:, :, counted:] = float("nan")
    positions = [before, held, *(length + 3 * i for i in range(batch))]
    mask = None
    if axes is not None:
        columns = np.arange(size + rows)
        mask = mx.array((rng.random((*axes, 1, columns.size)) < 0.7) | (columns == length))
    options = {"scale": width**-0.5, "rotation": rotation, "mask": mask}
    options["freqs"] = FREQS if rotation.base is None else None
    return [q, k, v, *buffers, mx.array(positions + [-1] * 7, mx.int32)], options


def turned(x, positions, rotation, dtype):
    """(B, H, 1, D), turned with every number in ``dtype``."""
    half = rotation.dims // 2
    if half == 0:
        return x
    rates = np.arange(0, rotation.dims, 2).astype(dtype) / dtype(rotation.dims)
    rates = (
        dtype(1) / to64(FREQS).astype(dtype)
        if rotation.base is None
        else np.exp2(-np.log2(dtype(rotation.base)) * rates)
    )
    angle = positions.astype(dtype)[:, None, None, None] * dtype(rotation.scale) * rates
    c, s = np.cos(angle), np.sin(angle)
    first, second = slice(half), slice(half, 2 * half)
    if rotation.traditional:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b, y = x[..., first], x[..., second], x.copy()
    y[..., first], y[..., second] = a * c - b * s, a * s + b * c
    return y


def expected(arrays, options, dtype, precision):
    """Output, its terms, and append buffers; rotated rows are rounded to ``precision``, if any."""
    q, k, v, *buffers, positions = (to64(a).astype(dtype) for a in arrays)
    batch, kv_heads, _, width = buffers[0].shape
    before, held = (int(n) for n in positions[:2])
    counts = (q.shape[2] // width, kv_heads, kv_heads)
    heads = [x.reshape(batch, n, 1, -1) for x, n in zip((q, k, v), counts, strict=True)]
    rotate = [turned(x, positions[2 : 2 + batch], options["rotation"], dtype) for x in heads[:2]]
    if precision is not None:
        rotate = [to64(round_to(x, precision)).astype(dtype) for x in rotate]
    q, k = rotate
    whole, appended = [], []
    for cache, beside, new in zip(buffers[:2], buffers[2:], (k, heads[2]), strict=True):
        appended.append(np.zeros_like(beside))
        appended[-1][:, :, :held], appended[-1][:, :, held : held + 1] = beside[:, :, :held], new
        whole.append(np.concatenate([cache[:, :, :before], beside[:, :, :held], new], axis=2))
    mask = options["mask"]
    mask = None if mask is None else to64(mask).astype(bool)[..., : before + held + 1]
    sinks = options.get("sinks")
    sinks = None if sinks is None else to64(sinks).astype(dtype)
    actual, terms = oracles.attention(q, *whole, options["scale"], mask, sinks=sinks, dtype=dtype)
    return actual["out"].reshape(batch, 1, -1), terms.get("out"), appended


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[:9]))
def test_against_float64(case, dtype, path):
    which = CASES.index(case)
    if path in ("host", "checked") and which % 3 != DTYPES.index(dtype):
        return  # Each case of another dtype is a kernel more to compile.
    arrays, options = make(case, dtype, path)
    with trace() as launches:
        out, *appended = attention_step(*arrays, **options)
    assert len(launches) == (0 if path == "reference" else 1 if case[3] <= 256 else 2)
    truth, terms, exact = expected(arrays, options, np.float64, None)
    rough, _, rows = expected(arrays, options, np.float32, dtype)
    assert out.dtype == dtype and out.shape == truth.shape
    assert_accurate(out, truth, round_to(rough, dtype), terms=terms, what="out")
    for made, wanted, row in zip(appended, exact, rows, strict=True):
        assert made.dtype == dtype
        assert_accurate(made, wanted, round_to(row, dtype), what="append buffer")
    held = slice(case[8])
    for made, beside in zip(appended, arrays[5:7], strict=True):
        assert mx.array_equal(made[:, :, held], beside[:, :, held])


@pytest.mark.parametrize(
    ("case", "group_size", "bits", "dtype"),
    [
        ((1, 7, 1, 300, 16, 128, 128, 280, 9, None, Rotation(0)), 64, 4, mx.float32),
        ((2, 4, 2, 40, 16, 64, 32, 17, 0, (2, 1), Rotation(0)), 32, 8, mx.bfloat16),
        ((1, 4, 2, 600, 16, 96, 64, 590, 15, None, Rotation(0)), 32, 4, mx.float16),
        ((1, 18, 1, 520, 8, 256, 128, 9, 3, None, Rotation(0)), 128, 8, mx.float16),
    ],
    ids=lambda value: str(value[:9]) if isinstance(value, tuple) else str(value),
)
def test_packed_caches(case, group_size, bits, dtype, path):
    """The token's row is packed as by mx.quantize, and attended to as it is then."""
    if path == ("checked" if dtype == mx.float16 else "host"):
        return
    arrays, options = make(case, dtype)
    packed = [mx.quantize(a, group_size, bits) for a in arrays[3:7]]
    token = [mx.quantize(a, group_size, bits) for a in arrays[1:3]]
    appended = [*map(packed_rows, packed[2:])]
    given = *arrays[:3], *map(tuple, packed[:2]), *appended, arrays[7]
    explain(reset=True)
    out, *made = attention_step(*given, **options)
    (decision,) = (d for d in explain() if d.op == "attention_step")
    assert path == "reference" or f"attention_step_packed, {bits} bits" in decision.reason
    held = case[8]
    for new, beside, own in zip(made, appended, token, strict=True):
        row = packed_rows([a.reshape(case[0], case[2], 1, -1) for a in own])
        whole = mx.concatenate([beside[:, :, :held], row], axis=2)
        if path not in GPUS:
            assert mx.array_equal(new[:, :, : held + 1], whole)
        assert not new[:, :, held + 1 :].any()

    def numbers(parts, kind):
        w, *groups = parts
        of_float = [a.astype(mx.float32) for a in groups]
        return mx.dequantize(w, *of_float, group_size, bits).astype(kind)

    def plain(kind):
        whole = [numbers(parts, kind) for parts in (*token, *packed)]
        return [arrays[0], *whole, arrays[7]]

    truth, terms, _ = expected(plain(mx.float32), options, np.float64, None)
    rough = expected(plain(dtype), options, np.float32, dtype)[0]
    assert_accurate(out, truth, round_to(rough, dtype), terms=terms, what="out")


@pytest.mark.parametrize(("which", "dtype"), [(2, mx.float32), (4, mx.bfloat16)])
def test_sinks(which, dtype, path):
    """One launch and two; heads without one, with one above all scores, and with one below."""
    arrays, options = make(CASES[which], dtype, path)
    heads = CASES[which][1]
    sinks = random(np.random.default_rng(3), (heads,), dtype)
    sinks[0], sinks[1], sinks[2] = float("-inf"), 9.0, -9.0
    # Every other of an array: as the others are, they are read where they lie, or copied.
    options["sinks"] = mx.repeat(sinks, 2)[::2]
    if path == "checked" and dtype == mx.bfloat16:
        return
    out, *_ = attention_step(*arrays, **options)
    truth, terms, _ = expected(arrays, options, np.float64, None)
    rough, _, _ = expected(arrays, options, np.float32, dtype)
    assert_accurate(out, truth, round_to(rough, dtype), terms=terms, what="out")


def normed(x, weight, kind):
    """Rows of heads behind an RMS norm of each, with every number in ``kind``."""
    heads, weight = to64(x).astype(kind).reshape(*x.shape[:-1], -1, weight.size), to64(weight)
    size = np.sqrt((heads * heads).mean(-1, keepdims=True) + kind(1e-3))
    return (heads / size * weight.astype(kind)).reshape(x.shape)


@pytest.mark.parametrize(
    ("which", "dtype"), [(0, mx.float32), (3, mx.float16), (4, mx.bfloat16)], ids=str
)
def test_norms_of_heads(which, dtype, path):
    """Ahead of their rotation and without one, of more queries than a tile has."""
    if path == "checked" and which != 4:
        return
    arrays, options = make(CASES[which], dtype, path)
    rng, width = np.random.default_rng(4), CASES[which][5]
    arrays[:2] = [0.01 * arrays[0], 30 * arrays[1]]
    norms = tuple(random(rng, (width,), dtype) for _ in range(2))
    out, k_append, _ = attention_step(*arrays, **options, norms=norms, epsilon=1e-3)

    def behind(kind, precision):
        rows = [normed(x, w, kind) for x, w in zip(arrays[:2], norms, strict=True)]
        rows = rows if precision is None else [round_to(x, precision) for x in rows]
        return expected([*rows, *arrays[2:]], options, kind, precision)

    truth, terms, (key, _) = behind(np.float64, None)
    rough, _, (row, _) = behind(np.float32, dtype)
    assert_accurate(out, truth, round_to(rough, dtype), terms=terms, what="out")
    assert_accurate(k_append, key, round_to(row, dtype), what="append buffer")


@pytest.mark.parametrize(("teams", "splits", "dtype"), [(2, 3, mx.float16), (4, 0, mx.bfloat16)])
def test_teams_of_a_threadgroup_and_the_last_one_that_adds_up(
    teams, splits, dtype, path, monkeypatch
):
    """What a GPU does in one launch, where others' writes are seen; the checked build sees none."""
    config = Step(1, 4, 1, 16, splits, teams=teams)
    monkeypatch.setattr(step, "configure", lambda *_: config)
    has_device(monkeypatch, "host", orders_threadgroups=path == "host")
    advance_epoch()
    arrays, options = make((1, 6, 2, 300, 40, 64, 64, 280, 33, None, Rotation(64)), dtype, path)
    semaphores = mx.zeros(8, mx.int32)
    truth, terms, _ = expected(arrays, options, np.float64, None)
    rough = expected(arrays, options, np.float32, dtype)[0]
    for _ in range(2):
        with trace() as launches:
            out, *_ = attention_step(*arrays, **options, semaphores=semaphores)
        assert_accurate(out, truth, round_to(rough, dtype), terms=terms, what="out")
        assert not semaphores.any().item()
    counts = {"reference": 0, "checked": 1 + (splits > 0)}
    assert len(launches) == counts.get(path, 1 if path in ("host", "cuda") else 1 + (splits > 0))
    advance_epoch()


def test_gradients_are_the_references():
    arrays, options = make(CASES[2], mx.float32)
    floats, positions = arrays[:7], arrays[7]

    def loss(*given):
        actual = attention_step(*given[:7], positions, **options | {"freqs": given[7]})
        return sum((y * y[..., ::-1]).sum() for y in actual)

    actual = mx.grad(loss, list(range(8)))(*floats, FREQS)
    with use_backend("reference"):
        wanted = mx.grad(loss, list(range(8)))(*floats, FREQS)
    for ours, theirs in zip(actual[:7], wanted, strict=False):
        assert mx.abs(theirs).max() > 0
        assert_same_sums(ours, theirs)
    assert not actual[7].any() and not wanted[7].any()


def test_one_graph_for_every_length(path):
    """Under ``mx.compile`` nothing depends on the number of keys."""
    if path in ("host", "checked"):  # It runs at once.
        return
    arrays, options = make(CASES[0], mx.float32)
    compiled = mx.compile(lambda *a: attention_step(*a, **options)[0])
    explain(reset=True)
    for before, held in ((0, 0), (1, 0), (17, 3), (40, 16)):
        arrays[7] = mx.array([before, held] + [before + held] * 6, mx.int32)
        truth, terms, _ = expected(arrays, options, np.float64, None)
        rough = expected(arrays, options, np.float32, mx.float32)[0]
        assert_accurate(compiled(*arrays), truth, rough, terms=terms)
    assert sum(d.calls for d in explain() if d.op == "attention_step") == 1


def test_a_batch_gives_each_member_what_a_batch_of_one_gives(path):
    arrays, options = make(CASES[4], mx.float16, path)
    together = attention_step(*arrays, **options)
    for i in range(3):
        one = [a[i : i + 1] for a in arrays[:7]]
        positions = mx.array([arrays[7][j].item() for j in (0, 1, 2 + i)] + [0] * 5, mx.int32)
        mask = options["mask"][i : i + 1]
        actual = attention_step(*one, positions, **options | {"mask": mask})
        assert path == "reference" or all(
            mx.array_equal(a[0], b[i]) for a, b in zip(actual, together, strict=True)
        )


def test_says_where_it_is_not_worth_while(path):
    assert why_not(mx.float32, 1, (1, 4, 256, 68), 64) == "no kernel for these shapes"
    assert why_not(mx.float32, 1, (1, 4, 0, 64), 64) == "no kernel for these shapes"
    for size in (256, 1 << 20):
        why = why_not(mx.float32, 1, (1, 4, size, 64), 64)
        assert why == ("asked for" if path == "reference" else None)
