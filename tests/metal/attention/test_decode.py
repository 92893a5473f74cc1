"""The decoding kernels against float64, what they read, and what they must not depend on."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import attention
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from tests import attention_cases
from tests.attention_cases import DTYPES, check_output
from tests.examples.heads import attended
from tests.gpus import GPUS, STAND_INS, on_gpus
from tests.launchers import attention_decode, decode_config
from tests.numerics import to64
from tests.pairwise import in_turn, pairwise

MASKS = ["none", "causal", "boolean", "padded", "one key", "additive", "hidden"]
# Those that share a kernel.
COMPILED = [("none",), ("causal",), ("boolean", "padded", "one key"), ("additive", "hidden")]
EXTRAS = [*attention_cases.EXTRAS[:4], {"window": 70, "softcap": 30.0, "sinks": True}]
# B, H, Hkv, L, S: one query and more, one tile of keys, more splits, and just around both.
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 1, 3, 8), (1, 8, 1, 1, 65), (2, 7, 7, 8, 290), (1, 14, 2, 1, 257)]
PATHS = ["host", *STAND_INS]


def make(seed, shape, widths=(64, 64), dtype=mx.bfloat16, kind="none", extra=None):
    """Random q, k, v and the options by name."""
    _, arrays, given = attention_cases.make(seed, (*shape, *widths), dtype, kind, extra)
    return arrays, dict.fromkeys(("mask", "window", "softcap", "sinks")) | given


def by_kernel(arrays, options, device="cuda", **changes):
    """The kernels with the configuration of a GPU, by default in three splits, or a CPU."""
    changes = {"max_splits": 3, **changes} if device == "cuda" else changes
    config = replace(decode_config(device, *arrays), **changes)
    with use_backend("host"):
        out = attention_decode(*arrays, **options, config=config)
        mx.eval(out)
    return out


@pytest.mark.parametrize("path", [*PATHS, *GPUS])
@pytest.mark.parametrize(
    ("kinds", "extra", "dtype", "shape"),
    in_turn(pairwise(COMPILED, EXTRAS), DTYPES, SHAPES),
    ids=str,
)
def test_against_float64(path, kinds, extra, dtype, shape):
    for kind in kinds:
        attended(path, (*shape, 64, 64), dtype, kind, extra, gradient=False)


# The head sizes of keys and of values, all of them on GPUs; one query, and some.
WIDTHS = [(width, width) for width in range(32, 257, 8)] + [(40, 72), (192, 128), (104, 200)]
MODELS = [(width, width) for width in (32, 56, 64, 80, 96, 128, 136, 256)] + WIDTHS[-3:]
LENGTHS = [((1, 7, 1, 1, 257), "none"), ((1, 4, 2, 3, 130), "causal")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("widths", "dtype", "length", "layout"),
    in_turn(pairwise(MODELS), DTYPES, LENGTHS, ("dense", "behind one")),
    ids=str,
)
def test_every_head_size(path, widths, dtype, length, layout):
    layouts = {"layouts": (layout,) * 5}
    attended(path, (*length[0], *widths), dtype, length[1], layouts, gradient=False)


@on_gpus
@pytest.mark.parametrize(("widths", "dtype", "length"), pairwise(WIDTHS, DTYPES, LENGTHS), ids=str)
def test_every_head_size_on_gpus(gpu, widths, dtype, length):
    attended(gpu, (*length[0], *widths), dtype, length[1], gradient=False)


@on_gpus
def test_many_rows_and_caches_in_place_on_gpus(gpu):
    arrays, options = make(2, (1, 28, 4, 8, 2100), (128, 128), mx.bfloat16, "causal")
    buffers = [mx.pad(a, [(0, 0), (0, 0), (0, 44), (0, 0)]) for a in arrays[1:]]
    caches = [a[..., :2100, :] for a in buffers]
    with use_backend(gpu):
        actual = attention(arrays[0], *caches, **options)
        check_output(actual, arrays, options)
        single = {**options, "scale": options["scale"]}
        twice = [mx.concatenate([a, a]) for a in arrays]
        assert mx.array_equal(attention(*twice, **single)[1:], actual)


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("splits", [1, 4])
def test_keys_and_values_are_read_once(bits, splits):
    """Twice the keys cost their own bytes more, for all 14 rows of the heads that share them."""
    read, size = [], []
    for keys in (256, 512):
        (q, *dense), options = make(3, (1, 14, 2, 2, keys), (64, 64), mx.float16)
        caches = [tuple(mx.quantize(a, 64, bits)) if bits else (a,) for a in dense]
        arrays = [q, *(c if bits else c[0] for c in caches)]
        with checks() as report:
            by_kernel(arrays, options, max_splits=splits)
        read.append(report.total("bytes_read"))
        size.append(sum(a.nbytes for c in caches for a in c))
    if bits == 0:
        assert read[1] - read[0] == size[1] - size[0]
    else:  # Lanes that share a group read its scale and bias in the same instruction.
        words = [8 * 2 * 2 * n * 64 // 8 for n in (256, 512)]
        assert (
            size[1] - size[0]
            <= read[1] - read[0]
            <= words[1] - words[0] + 8 * (size[1] - size[0] - words[1] + words[0])
        )


def test_a_batch_gives_each_member_what_a_batch_of_one_gives():
    for shape in ((3, 8, 2, 1, 257), (3, 4, 4, 5, 65)):
        (q, k, v), options = make(4, shape, kind="padded")
        together = by_kernel((q, k, v), options)
        for i in range(3):
            part = slice(i, i + 1)
            single = {**options, "mask": options["mask"][part]}
            assert mx.array_equal(by_kernel((q[part], k[part], v[part]), single), together[part])


def test_strided_caches_are_read_in_place():
    (q, k, v), options = make(5, (2, 6, 2, 1, 4096), dtype=mx.float16)
    buffer = mx.full((2, 2, 5000, 64), float("nan"), mx.float16)
    caches = []
    for a in (k, v):
        cache = mx.array(buffer)
        cache[..., :4096, :] = a
        caches.append(cache[..., :4096, :])
    expected = by_kernel((q, k, v), options)
    mx.eval(caches)
    by_kernel((q, *caches), options)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert mx.array_equal(by_kernel((q, *caches), options), expected)
    assert mx.get_peak_memory() - before < k.nbytes / 4


@pytest.mark.parametrize("bits", [0, 4])
def test_any_strides(bits):
    """Axes in another order, rows that are not aligned, elements that are not neighbours."""
    (q, k, v), options = make(6, (2, 4, 2, 3, 67), dtype=mx.float16)
    packed = [tuple(mx.quantize(a, 64, bits)) if bits else (a,) for a in (k, v)]

    def moved(change, device="cuda"):
        caches = [tuple(change(a) for a in cache) for cache in packed]
        return by_kernel((q, *(c if bits else c[0] for c in caches)), options, device)

    expected = {device: moved(lambda a: a, device) for device in ("cuda", "host")}
    odd = lambda a: mx.pad(a, [(0, 0), (0, 0), (0, 0), (1, 2)])[..., 1:-2]  # noqa: E731
    for change in (
        lambda a: mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2),
        lambda a: mx.contiguous(a.swapaxes(2, 3)).swapaxes(2, 3),
        lambda a: mx.repeat(a, 2, axis=3)[..., ::2],
        odd,
    ):
        for device, wanted in expected.items():
            assert mx.array_equal(moved(change, device), wanted)


def test_nan_stays_in_its_row():
    (q, k, v), options = make(9, (1, 4, 2, 2, 130), dtype=mx.float16)
    q = mx.where((mx.arange(4) == 2)[None, :, None, None] & (mx.arange(2) == 1)[:, None], np.nan, q)
    out = np.isfinite(to64(by_kernel((q.astype(mx.float16), k, v), options)))
    assert not out[0, 2, 1].any() and out.sum() == out.size - 64


def test_one_launch_for_a_short_cache_and_two_for_a_long_one():
    for keys, names in (
        (100, ["attention_decode"]),
        (500, ["attention_decode", "attention_combine"]),
    ):
        arrays, options = make(10, (2, 7, 7, 1, keys))
        with trace() as launches:
            by_kernel(arrays, options)
        assert [launch.kernel for launch in launches] == names
