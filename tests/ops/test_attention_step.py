"""A step of decoding against float64: rotation, new rows of the buffers, attention."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.ops.attention_step import Rotation, attention_step, why_not
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from tests import oracles
from tests.gpus import GPUS
from tests.numerics import assert_accurate, assert_same_sums, random, round_to, to64

FREQS = mx.array(np.random.default_rng(9).uniform(1, 100, 16).astype(np.float32))
# B, H, Hkv, S, D, Dv, keys in the buffer, the first axes of a mask, the rotation.
CASES = [
    (1, 4, 2, 40, 64, 64, 17, None, Rotation(64)),
    (2, 7, 1, 64, 128, 128, 0, (2, 1), Rotation(128, traditional=True)),
    (1, 3, 3, 34, 40, 72, 33, (1, 3), Rotation(32, base=None)),
    (1, 2, 1, 2100, 192, 128, 2000, None, Rotation(0)),
    (3, 2, 2, 2050, 32, 256, 300, (3, 1), Rotation(24, scale=0.25)),
    (9, 5, 1, 2, 8, 16, 1, None, Rotation(8, base=500.0)),
]


@pytest.fixture(params=["ops", "host", "checked", *GPUS], autouse=True)
def path(request):
    """The reference, the fast and the checked build of the host backend, and GPUs."""
    name = "host" if request.param == "checked" else request.param
    with use_backend(name), checks(request.param == "checked"):
        yield request.param


def make(case, dtype, path="ops"):
    """Random arrays and options; what a buffer does not hold is NaN where the kernel reads it."""
    batch, heads, kv_heads, size, width, v_width, length, axes, rotation = case
    rng = np.random.default_rng(width + length)
    q = random(rng, (batch, 1, heads * width), dtype)
    k, v = (random(rng, (batch, 1, kv_heads * n), dtype) for n in (width, v_width))
    buffers = [random(rng, (batch, kv_heads, size, n), dtype) for n in (width, v_width)]
    if path != "ops":
        for buffer in buffers:
            buffer[:, :, length:] = float("nan")
    positions = [length, *(length + 3 * i for i in range(batch))]
    mask = None
    if axes is not None:
        mask = mx.array((rng.random((*axes, 1, size + 1)) < 0.7) | (np.arange(size + 1) == length))
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
    """Output, its terms, and buffers; rotated rows are rounded to ``precision``, if any."""
    q, k, v, k_buffer, v_buffer, positions = (to64(a).astype(dtype) for a in arrays)
    batch, kv_heads, _, width = k_buffer.shape
    length = int(positions[0])
    counts = (q.shape[2] // width, kv_heads, kv_heads)
    heads = [x.reshape(batch, n, 1, -1) for x, n in zip((q, k, v), counts, strict=True)]
    rotate = [turned(x, positions[1 : 1 + batch], options["rotation"], dtype) for x in heads[:2]]
    if precision is not None:
        rotate = [to64(round_to(x, precision)).astype(dtype) for x in rotate]
    q, k = rotate
    buffers = []
    for buffer, new in ((k_buffer, k), (v_buffer, heads[2])):
        made = np.zeros_like(buffer)
        made[:, :, :length], made[:, :, length : length + 1] = buffer[:, :, :length], new
        buffers.append(made)
    mask = options["mask"]
    mask = None if mask is None else to64(mask).astype(bool)[..., : length + 1]
    actual, terms = oracles.attention(
        q, *(b[:, :, : length + 1] for b in buffers), options["scale"], mask, dtype=dtype
    )
    return actual["out"].reshape(batch, 1, -1), terms.get("out"), buffers


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[:7]))
def test_against_float64(case, dtype, path):
    if path == "checked" and case[3] > 100 and dtype != mx.float16:
        return
    arrays, options = make(case, dtype, path)
    with trace() as launches:
        out, *buffers = attention_step(*arrays, **options)
    assert len(launches) == (0 if path == "ops" else 1 if case[3] <= 1024 else 2)
    truth, terms, exact = expected(arrays, options, np.float64, None)
    rough, _, rows = expected(arrays, options, np.float32, dtype)
    assert out.dtype == dtype and out.shape == truth.shape
    assert_accurate(out, truth, round_to(rough, dtype), terms=terms, what="out")
    for made, wanted, row in zip(buffers, exact, rows, strict=True):
        assert made.dtype == dtype
        assert_accurate(made, wanted, round_to(row, dtype), what="buffer")
    held = slice(case[6])
    for made, buffer in zip(buffers, arrays[3:5], strict=True):
        assert mx.array_equal(made[:, :, held], buffer[:, :, held])


def test_gradients_are_the_references():
    arrays, options = make(CASES[2], mx.float32)
    floats, positions = arrays[:5], arrays[5]

    def loss(*given):
        actual = attention_step(*given[:5], positions, **options | {"freqs": given[5]})
        return sum((y * y[..., ::-1]).sum() for y in actual)

    actual = mx.grad(loss, list(range(6)))(*floats, FREQS)
    with use_backend("ops"):
        wanted = mx.grad(loss, list(range(6)))(*floats, FREQS)
    for ours, theirs in zip(actual[:5], wanted, strict=False):
        assert mx.abs(theirs).max() > 0
        assert_same_sums(ours, theirs)
    assert not actual[5].any() and not wanted[5].any()


def test_one_graph_for_every_length(path):
    """Under ``mx.compile`` nothing depends on the number of keys."""
    if path in ("host", "checked"):  # It runs at once.
        return
    arrays, options = make(CASES[0], mx.float32)
    compiled = mx.compile(lambda *a: attention_step(*a, **options)[0])
    explain(reset=True)
    for length in (0, 1, 17, 39):
        arrays[5] = mx.array([length] * 8, mx.int32)
        truth, terms, _ = expected(arrays, options, np.float64, None)
        rough = expected(arrays, options, np.float32, mx.float32)[0]
        assert_accurate(compiled(*arrays), truth, rough, terms=terms)
    assert sum(d.calls for d in explain() if d.op == "attention_step") == 1


def test_a_batch_gives_each_member_what_a_batch_of_one_gives(path):
    arrays, options = make(CASES[4], mx.float16, path)
    together = attention_step(*arrays, **options)
    for i in range(3):
        one = [a[i : i + 1] for a in arrays[:5]]
        positions = mx.array([arrays[5][j].item() for j in (0, 1 + i)] + [0] * 6, mx.int32)
        mask = options["mask"][i : i + 1]
        actual = attention_step(*one, positions, **options | {"mask": mask})
        assert path == "ops" or all(
            mx.array_equal(a[0], b[i]) for a, b in zip(actual, together, strict=True)
        )


def test_says_where_it_is_not_worth_while():
    assert why_not((1, 4, 256, 68), 64, Rotation(68)) == "no kernel for these shapes"
    assert why_not((1, 4, 0, 64), 64, Rotation(64)) == "no kernel for these shapes"
    with use_backend("ops"):
        assert why_not((1, 4, 256, 64), 64, Rotation(64)) == "it was not measured on ops"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: mx.zeros((1, 2, 256))}, r"q must be \(B, 1, H \* D\).*\(1, 2, 256\)"),
        ({0: mx.zeros((1, 1, 256), mx.int32)}, "q must be .* not mlx.core.int32"),
        ({0: mx.zeros((1, 1, 200))}, "q must have a multiple of 2 heads of 64"),
        ({0: mx.zeros((1, 1, 0))}, "q must have a multiple of 2 heads of 64"),
        ({4: mx.zeros(())}, r"v_buffer must be \(B, Hkv, S, Dv\), not \(\)"),
        ({4: mx.zeros((1, 2, 40, 0)), 2: mx.zeros((1, 1, 0))}, "v_buffer must be"),
        ({"scale": 2**200}, "scale must be a finite number, not 160693"),
        ({"rotation": 64}, "rotation must be a Rotation, not 64"),
        ({1: mx.zeros((1, 1, 64))}, r"k must be .*\(1, 1, 128\), not .*\(1, 1, 64\)"),
        ({2: mx.zeros((1, 1, 128), mx.float16)}, "v must be .*float32.* not .*float16"),
        ({3: mx.zeros((2, 2, 40, 64))}, r"k_buffer must be \(1, Hkv, S, D\)"),
        ({4: mx.zeros((1, 3, 40, 64))}, r"v_buffer must be .*\(1, 2, 40, 64\), not"),
        ({5: mx.zeros((7,), mx.int32)}, r"positions must be int32 and 8 or more, not .*\(7,\)"),
        ({5: mx.zeros((8,))}, "positions must be int32"),
        ({"mask": mx.ones((1, 1, 1, 40))}, "mask must be bool"),
        ({"mask": mx.ones((1, 1, 1, 39), mx.bool_)}, r"mask must be bool \(1, 4, 1, 40\), not"),
        ({"rotation": Rotation(7)}, "dims must be even and at most 64, not 7"),
        ({"rotation": Rotation(66)}, "dims must be even and at most 64, not 66"),
        ({"rotation": Rotation(64, base=None)}, "one of base and freqs must be given"),
        ({"freqs": FREQS}, "one of base and freqs must be given"),
        (
            {"rotation": Rotation(64, base=None), "freqs": FREQS},
            r"freqs must have shape \(32,\), not \(16,\)",
        ),
    ],
    ids=str,
)
def test_bad_input(change, message):
    arrays, options = make(CASES[0], mx.float32)
    arrays = [change.get(i, array) for i, array in enumerate(arrays)]
    options |= {name: value for name, value in change.items() if isinstance(name, str)}
    with pytest.raises(ValueError, match=message):
        attention_step(*arrays, **options)
