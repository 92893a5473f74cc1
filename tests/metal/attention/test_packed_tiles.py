"""Attention of many queries to packed keys and values, read tile by tile where they lie."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import attention, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.forward import Launcher, attention_forward
from mlx_qlayers.metal.attention.layout import Layout
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from tests.attention_cases import EXTRAS, MASKS, check_output, make
from tests.gpus import on_gpus
from tests.numerics import assert_same_sums
from tests.packed import dequantize64
from tests.pairwise import in_turn, pairwise

# B, H, Hkv, L, S: no length is a multiple of a tile; more queries than keys, and fewer.
SHAPES = [
    (2, 2, 2, 9, 2),
    (2, 6, 2, 33, 70),
    (2, 3, 3, 70, 33),
    (1, 7, 1, 17, 130),
]
# Bits, group size, dtype, head sizes.
FORMATS = [
    ((8, 8), 64, mx.bfloat16, (128, 128)),
    ((4, 4), 32, mx.float16, (96, 64)),
    ((8, 3), 32, mx.float32, (64, 160)),
    ((4, 4), 64, mx.bfloat16, (64, 64)),
    ((8, 8), 128, mx.float16, (128, 256)),
    ((4, 2), 64, mx.float32, (192, 128)),
    ((3, 8), 32, mx.bfloat16, (64, 96)),
]
CASES = in_turn(pairwise(SHAPES, FORMATS), MASKS, EXTRAS)


def in_a_cache(a, rng):
    """A view of a larger buffer, in which what is outside spoils whatever reads it."""
    room = [(0, 0), (0, 1), (3, int(rng.integers(1, 40))), (0, 0)]
    spoilt = mx.array(0xFFFFFFFF, a.dtype) if a.dtype == mx.uint32 else mx.array(np.nan, a.dtype)
    return mx.pad(a, room, constant_values=spoilt)[:, :-1, 3 : 3 + a.shape[2]]


def packed_case(shape, kind, fmt, extra):
    """q, packed k and v, the same with what these stand for, and options."""
    bits, group, dtype, widths = fmt
    rng, (q, *dense), options = make(0, (*shape, *widths), dtype, kind, extra)
    packed = [mx.quantize(a, group, n) for a, n in zip(dense, bits, strict=True)]
    exact = [(dequantize64(*a, Format(group, n)),) for a, n in zip(packed, bits, strict=True)]
    given = [tuple(in_a_cache(a, rng) for a in parts) for parts in packed]
    return (q, *given), (q, *exact), dict.fromkeys(("window", "softcap", "sinks")) | options


@pytest.mark.parametrize(("shape", "fmt", "kind", "extra"), CASES[::2], ids=str)
def test_against_float64(shape, kind, fmt, extra):
    arrays, exact, options = packed_case(shape, kind, fmt, extra)
    with use_backend("host"), checks(), trace() as launches:
        out = attention(*arrays, **options)
        mx.eval(out)
    assert [launch.kernel for launch in launches] == ["attention_forward_packed"]
    check_output(out, exact, options, packed=True)


@on_gpus
@pytest.mark.parametrize(("shape", "fmt", "kind", "extra"), CASES, ids=str)
def test_on_gpus(gpu, shape, kind, fmt, extra):
    arrays, exact, options = packed_case(shape, kind, fmt, extra)
    with use_backend(gpu):
        check_output(attention(*arrays, **options), exact, options, packed=True)


@pytest.mark.parametrize(
    "changes", [{}, {"simds": 8, "tile": 64}, {"slices": 2, "alternate": True}]
)
def test_layouts_give_the_same(changes):
    """Shares of 8 and of 16 numbers, more than threads and fewer, and one place for both tiles."""
    (q, k, v), exact, options = packed_case(SHAPES[1], "causal", FORMATS[3], {})
    scores = Scores(options["scale"], True)
    call = AttentionCall(Spec.of(q), *(tuple(map(Spec.of, parts)) for parts in (k, v)), scores)
    with use_backend("host"), checks():
        out, _ = attention_forward(Launcher(call), Layout(**changes))(q, *k, *v, None, None)
    check_output(out, exact, options, packed=True)


def test_the_gradient_of_queries_is_that_with_dense_keys():
    (q, k, v), _, options = packed_case(SHAPES[1], "causal", FORMATS[2], {})
    dense = [mx.dequantize(*parts, 32, bits) for parts, bits in ((k, 8), (v, 3))]

    def loss(q, k, v):
        return (attention(q, k, v, **options) ** 2).sum()

    with use_backend("host"):
        assert_same_sums(*(mx.grad(loss)(q, *caches) for caches in ((k, v), dense)))


def test_a_cache_of_less_than_eight_groups():
    """MLX would pass their scales in another address space."""
    (q, k, v), exact, options = packed_case((1, 2, 1, 9, 1), "causal", FORMATS[3], {})
    with use_backend("host"):
        check_output(attention(q, k, v, **options), exact, options, packed=True)
