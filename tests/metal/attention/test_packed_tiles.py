"""Attention of many queries to packed keys and values, read tile by tile where they lie."""

import mlx.core as mx
import pytest

from mlx_qlayers import attention, use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.forward import Launcher, attention_forward
from mlx_qlayers.metal.attention.layout import Layout
from mlx_qlayers.options import AttentionCall, Scores
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.spec import Spec
from tests.attention_cases import EXTRAS, MASKS, check_output, make
from tests.examples.arrays import LAID_OUT
from tests.examples.heads import attended
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


def packed_case(shape, kind, fmt, extra):
    """q, packed k and v, the same with what these stand for, and options."""
    bits, group, dtype, widths = fmt
    _, (q, *dense), options = make(0, (*shape, *widths), dtype, kind, extra)
    packed = [mx.quantize(a, group, n) for a, n in zip(dense, bits, strict=True)]
    exact = [(dequantize64(*a, Format(group, n)),) for a, n in zip(packed, bits, strict=True)]
    given = [tuple(LAID_OUT["part"](a) for a in parts) for parts in packed]
    return (q, *given), (q, *exact), dict.fromkeys(("window", "softcap", "sinks")) | options


def by_table(path, shape, kind, fmt, extra):
    bits, group, dtype, widths = fmt
    given = {"packing": (group, *bits), "layouts": ("part",) * 9, **extra}
    return attended(path, (*shape, *widths), dtype, kind, given, gradient=False)


@pytest.mark.parametrize(("shape", "fmt", "kind", "extra"), CASES[::2], ids=str)
def test_against_float64(shape, kind, fmt, extra):
    assert by_table("checked", shape, kind, fmt, extra) == ["attention_forward_packed"]


@on_gpus
@pytest.mark.parametrize(("shape", "fmt", "kind", "extra"), CASES, ids=str)
def test_on_gpus(gpu, shape, kind, fmt, extra):
    by_table(gpu, shape, kind, fmt, extra)


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
