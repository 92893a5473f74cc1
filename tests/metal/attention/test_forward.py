"""The tiled attention kernels against float64, what they read, and what they keep."""

from collections import Counter
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import DTYPES, EXTRAS, MASKS, check_compiled, expect, make
from numerics import assert_accurate, random
from pairwise import pairwise
from runtime.host import mlx_kernels as mk

from mlx_qlayers.metal.attention.layout import Layout, layout, registers
from mlx_qlayers.ops.attention import attention
from mlx_qlayers.runtime import trace, use_backend
from mlx_qlayers.runtime.host import checks
from tests.examples.heads import attended
from tests.gpus import GPUS, NAMES, on_gpus

# B, H, Hkv, L, S; the first are as few queries as the decoding kernels take.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 1, 17, 257),
    (1, 7, 7, 33, 8),
    (1, 8, 1, 33, 65),
    (1, 3, 3, 129, 65),
]
ALL = {"window": 9, "softcap": 30.0, "sinks": True}
KINDS = ("none", "causal")
KERNELS = ("forward", "queries", "keys")
# The head sizes of keys and of values.
WIDTHS = [(width, width) for width in range(32, 257, 8)] + [(192, 128), (40, 72)]


@pytest.fixture(autouse=True)
def on_the_checked_build(request):
    if any(map(request.node.get_closest_marker, NAMES)):  # without a compiler for the host, too
        yield
        return
    with use_backend("host"), checks():
        yield


# Masks that kernels are compiled for; those of one kind differ in values and shapes.
COMPILED = {"none": 0, "causal": 0, "additive": 2, "biased": 2}


@pytest.mark.parametrize("path", ["checked", *GPUS])
@pytest.mark.parametrize(
    ("shape", "kind", "extra", "dtype"),
    [
        # A dtype meets all shapes, and masks with and without a cap; such rows share kernels.
        (shape, kind, extra, DTYPES[(COMPILED.get(kind, 1) + ("softcap" in extra)) % 3])
        for shape, kind, extra in (row.values for row in pairwise(SHAPES, MASKS, EXTRAS))
    ],
    ids=str,
)
def test_every_mask_and_dtype(path, shape, kind, extra, dtype):
    width = 32 if path == "checked" else 64
    attended(path, (*shape, width, width), dtype, kind, extra)


def head_sizes():
    """Rows in which each kernel runs in each of its layouts for Apple GPUs, and some for CUDA.

    Each dtype has heads whose last 16 columns are all there and heads whose are not. The types of
    two bytes, which share their layouts, and the kinds of masks take turns. On GPUs all run.
    """
    rows: dict[tuple, set] = {}
    for widths, dtype in product(WIDTHS, DTYPES):
        layouts = [layout(kernel, "metal", dtype, max(widths)) for kernel in KERNELS]
        runs = {*zip(KERNELS, [dtype.size] * len(KERNELS), layouts, strict=True)}
        own = {widths} if widths[0] != widths[1] else set()
        rows[widths, dtype] = runs | own | {(dtype, widths[0] % 16)}
    missing, used, found = set().union(*rows.values()), Counter(), []
    while missing:
        # Of those that add most, the row whose type was used least.
        row = max(rows, key=lambda r: (len(missing & rows[r]), -used[r[1]]))
        missing -= rows[row]
        used[row[1]] += 1
        found.append((*row, "metal", KINDS[len(found) % 2]))
    on_cuda = ((56, mx.float16), (128, mx.bfloat16), (256, mx.float16))
    return found + [((width, width), dtype, "cuda", "causal") for width, dtype in on_cuda]


@pytest.mark.parametrize(("widths", "dtype", "device", "kind"), head_sizes(), ids=str)
def test_every_head_size(widths, dtype, device, kind):
    attended(f"as {device}", (1, 2, 1, 21, 37, *widths), dtype, kind)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("device, most", [("metal", 104), ("cuda", 224)])
def test_registers_up_to_heads_of_128(kernel, device, most):
    """The kept values leave room for addresses: of 128 on Apple GPUs, of 255 on NVIDIA's.

    On an M1 or M2 104 of them, and 8 that hold parts of bfloat while they are widened.
    """
    for dtype in (mx.float16, mx.bfloat16):
        for width in range(32, 129, 8):
            chosen = layout(kernel, device, dtype, width)
            values = {"T": dtype, "D": width, "DV": width, "ROLES": chosen.roles}
            held = registers(kernel, values | chosen.template(), device)
            widened = 8 if device == "metal" and dtype == mx.bfloat16 else 0
            assert held <= most + widened, (width, chosen)


def test_layouts_that_cannot_be():
    for wrong in ({"tile": 24}, {"simds": 3, "slices": 2}, {"alternate": True, "ahead": True}):
        with pytest.raises(ValueError):
            Layout(**wrong)


def test_queries_whose_first_tile_is_hidden():
    """Scores of hidden keys must not make infinities, however their scaled value is rounded."""
    rng, arrays, options = make(7, (1, 1, 1, 70, 70, 32, 32), mx.float32, "none", {"window": 3})
    for _ in range(16):
        options["scale"] = float(rng.uniform(0.05, 1.0))
        truth, rounded, terms = expect(arrays, options, mx.float32)["out"]
        assert_accurate(attention(*arrays, **options), truth, rounded, terms=terms)


def test_the_gradient_of_the_mask_is_made_only_on_request():
    _, (q, k, v), options = make(5, (1, 2, 1, 9, 33, 32, 32), mx.float32, "additive")
    with trace() as launches:
        mx.eval(mx.grad(lambda q: attention(q, k, v, **options).sum())(q))
    assert "attention_backward_mask" not in [launch.kernel for launch in launches]


HEADS, LENGTH, WIDTH = 2, 128, 64


def counted(extra=None, gradient=False, width=WIDTH):
    """Bytes of device memory that each kernel reads, and that an array of keys has."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (random(rng, (1, HEADS, LENGTH, width), mx.float16) for _ in range(4))

    def run(q, k, v):
        return [attention(q, k, v, scale=0.1, **(extra or {}))]

    with checks() as report:
        mx.eval(mx.vjp(run, [q, k, v], [d_out]) if gradient else run(q, k, v))
    return report, k.nbytes


def test_keys_and_values_are_read_once_for_each_tile_of_queries():
    report, keys = counted()
    tiles = LENGTH // layout("forward", "metal", mx.float16, WIDTH).rows
    least = keys + 2 * tiles * keys
    assert least <= report.total("bytes_read") <= 1.02 * least


def test_traffic_of_the_backward_pass_is_what_its_source_says():
    report, keys = counted(gradient=True)
    tiles = {
        name: LENGTH // layout(name, "metal", mx.float16, WIDTH).rows
        for name in ("queries", "keys")
    }
    of_queries = 3 * keys + 2 * tiles["queries"] * keys
    of_keys = 2 * keys + tiles["keys"] * (2 * keys + 8 * HEADS * LENGTH)
    for kernel, least in (("queries", of_queries), ("keys", of_keys)):
        read = report.total("bytes_read", f"attention_backward_{kernel}")
        assert least <= read <= 1.1 * least, kernel


def test_a_window_skips_what_it_hides():
    whole, part = (counted(extra)[0].total("bytes_read") for extra in ({}, {"window": 16}))
    assert part <= 0.75 * whole


@pytest.mark.parametrize("width, block", [(64, 32), (128, 16)])
def test_no_more_traffic_than_the_attention_of_mlx(width, block):
    """The written outputs include those for the gradient alone."""
    report, _ = counted({"mask": "causal"}, width=width)
    rng = np.random.default_rng(0)
    arrays = (random(rng, (1, HEADS, LENGTH, width), mx.float16) for _ in range(3))
    _, theirs = mk.attention(*arrays, (32, block), causal=True)
    assert report.total("bytes_read") <= theirs.bytes_read
    ours = report.total("bytes_read") + report.total("bytes_written")
    assert ours <= theirs.bytes_read + theirs.bytes_written


@on_gpus
@pytest.mark.parametrize(("widths", "dtype", "kind"), pairwise(WIDTHS, DTYPES, KINDS), ids=str)
def test_every_head_size_on_gpus(gpu, widths, dtype, kind):
    """Over more than one tile, the last of them not whole."""
    attended(gpu, (1, 2, 1, 150, 333, *widths), dtype, kind)


@on_gpus
def test_compiled_on_gpus(gpu):
    with use_backend(gpu):
        check_compiled(attention, ALL)
