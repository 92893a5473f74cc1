"""A kernel function is taken from its file with what it uses, as MLX wants to have it."""

import re

import pytest

from mlx_qlayers.runtime.parse import parse
from mlx_qlayers.runtime.source import SourceError

from .kernels import FILE

KERNEL = "[[kernel]] void k(device float* y, uint i [[thread_position_in_grid]]) {BODY}"


def load(tmp_path, text, body="y[i] = f(i);", name="k"):
    path = tmp_path / "test.metal"
    path.write_text(text + "\n" + KERNEL.replace("BODY", body))
    return parse(path, name, name)


def test_only_what_is_used_is_taken(tmp_path):
    text = """
    #define TWICE(x) ((x) * FACTOR)
    #define FACTOR 2
    #define UNUSED 3
    constant constexpr const float table[2] = {1.0f, 2.0f};
    constant int other = 1;
    struct Pair { float a; float b; };
    struct Single { float a; };
    inline Pair operator+(thread const Pair& p, thread const Pair& q) { return Pair{p.a + q.a, 0}; }
    inline Single operator+(thread const Single& p, float q) { return Single{p.a + q}; }
    enum Mode { slow, fast };
    enum Other { never };
    using Acc = float;
    typedef uint Index;
    template <typename T, int N = 4> struct Block { T v[N]; };
    template <> struct Block<half, 4> { half4 v; };
    inline float leaf(float x) { return TWICE(x); }
    inline float leaf(Pair x) { return x.a; }
    template <typename T, typename U = metal::enable_if_t<true>>
    metal::vec<T, 4> load(Block<T> x) { return fast ? x.v[0] : table[0]; }
    inline float f(uint i) { Pair p{1, 2}; return leaf((p + p).a) + load(Block<half>()).x; }
    METAL_FUNC Acc g(float x) { return x; }
    """
    header = load(tmp_path, text).header
    for present in (
        "#define TWICE(x) ((x) * FACTOR)\n#define FACTOR 2\n",
        "table[2]={1.0f,2.0f};",
        "struct Pair{",
        "Pair operator+",
        "enum Mode",
        "struct Block{",
        "struct Block<half,4>",
        "leaf(float x)",
        "leaf(Pair x)",
        "metal::vec<T,4>load",
    ):
        assert present in header, present
    for absent in ("UNUSED", "other", "Single", "Other", "Acc", "Index", "g("):
        assert absent not in header, absent


def test_an_included_file_gives_only_what_is_used(tmp_path):
    (tmp_path / "common.metal").write_text(
        "#pragma once\ninline float f(float x) { return x; }\ninline float g(float x) { return x; }"
    )
    (tmp_path / "more.metal").write_text('#include "common.metal"\nconstant int unused = 1;')
    made = load(tmp_path, '#include "common.metal"\n#include "more.metal"\n#include <metal_stdlib>')
    assert made.header == "inline float f(float x){return x;}\n"


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("device float* y", "no thread attribute"),
        ("const device float* x, uint i [[thread_position_in_grid]]", "no output"),
        ("device float* y, const device float* x, uint i [[thread_position_in_grid]]", "behind"),
        (
            "device float* y, threadgroup float* t, uint i [[thread_position_in_grid]]",
            "in the body",
        ),
        ("device float* y, int n, uint i [[thread_position_in_grid]]", "needs device"),
        ("device float* y, uint i [[amplification_id]]", "no attribute"),
        ("device float* y, uint4 i [[thread_position_in_grid]]", "rename"),
        ("device float* y, device atomic_int* z, uint i [[thread_position_in_grid]]", "or none"),
        ("device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]", "counts in order"),
        ("device float* y [[buffer]], uint i [[thread_position_in_grid]]", "lacks its number"),
        ("device float y[4], uint i [[thread_position_in_grid]]", "cannot read"),
        (
            "const device float* x, const device int* x_shape, device float* y, "
            "uint i [[thread_position_in_grid]]",
            "passes x_shape as constant int32_t",
        ),
    ],
)
def test_signatures_that_mlx_cannot_generate(tmp_path, signature, message):
    path = tmp_path / "bad.metal"
    path.write_text(f"[[kernel]] void k({signature}) {{ y[i] = 0; }}")
    with pytest.raises(SourceError, match=re.escape(message)) as caught:
        parse(path, "k", "k")
    assert "bad.metal" in str(caught.value)


def test_a_word_that_ends_like_a_shape_is_refused(tmp_path):
    path = tmp_path / "test.metal"
    path.write_text(
        "[[kernel]] void k(const device float* x, device float* y, "
        "uint i [[thread_position_in_grid]]) { int max_shape = 1; y[i] = x[max_shape]; }"
    )
    with pytest.raises(SourceError, match="would pass x_shape"):
        parse(path, "k", "k")


def test_a_missing_kernel_names_those_that_exist():
    with pytest.raises(SourceError, match="no kernel 'sum', only affine, gather, histogram"):
        parse(FILE, "sum", "sum")
