"""A kernel function is taken from its file with what it uses, as MLX wants to have it."""

from __future__ import annotations

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


def test_attributes_take_the_name_of_the_file(tmp_path):
    path = tmp_path / "test.metal"
    path.write_text(
        "kernel void k(device float* y, uint2 at [[thread_position_in_grid]], "
        "ushort lane [[thread_index_in_simdgroup]], uint3 size [[threads_per_grid]], "
        "uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {\n"
        "y[at.x + lane + threadgroup_position_in_grid.x] = at.y; }"
    )
    assert parse(path, "k", "k").source == (
        "uint2 at=uint2(thread_position_in_grid.x,thread_position_in_grid.y);\n"
        "ushort lane=thread_index_in_simdgroup;\n"
        "y[at.x+lane+threadgroup_position_in_grid.x]=at.y;"
    )


def test_the_test_kernels_are_read_as_written():
    made = parse(FILE, "affine", "affine")
    assert made.template == (("T", "typename"), ("N", "int"), ("NEGATE", "bool"))
    assert [(p.name, p.type, p.space, p.reference) for p in (*made.inputs, *made.outputs)] == [
        ("x", "T", "device", False),
        ("a", "float", "constant", True),
        ("b", "float", "constant", False),
        ("y", "T", "device", False),
    ]
    assert re.findall(r"float (\w+)\(", made.header) == ["wide", "load"]
    assert not made.cooperative
    assert parse(FILE, "row_sums", "row_sums").cooperative
    assert parse(FILE, "histogram", "histogram").atomic_outputs
    assert "health" not in parse(FILE, "roots", "roots").source


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "template void k(device int* y, uint i [[thread_position_in_grid]]) { y[i] = 0; }",
            "its template has no end",
        ),
        ("template <typename {T> void k(device T* y) {} void f() ) {}", "read its parameters"),
    ],
)
def test_templates_that_do_not_end(tmp_path, text, message):
    path = tmp_path / "bad.metal"
    path.write_text(text.replace("void k", "[[kernel]] void k"))
    with pytest.raises(SourceError, match=message):
        parse(path, "k", "k")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y[i] = max_shape;", None),
        ("y[i] = threads_per_grid.x;", "threads_per_grid is not in the signature"),
    ],
)
def test_words_that_mlx_would_take_for_its_own(tmp_path, body, message):
    if message is None:
        assert load(tmp_path, "", body).source.endswith(body.replace(" ", ""))
    else:
        with pytest.raises(SourceError, match=message):
            load(tmp_path, "", body)


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


TEXT = """
// A comment.
#include "common.metal"

inline float f(float x) {
  return x; }
/* A longer
   one. */
kernel void k(
    device float* y, const device float* x, uint3 at [[thread_position_in_grid]]) {
  health_check(true, 1, 1.0f);
  y[at.x] = /* two lines
   */ f(1);

  if (y[0] > 0) { return; }
  y[at.y] = g(2);
}
"""
SHORT = TEXT.replace("g(2)", "f(2)").replace('#include "common.metal"', "")
SHORT = SHORT.replace(" const device float* x,", "")


@pytest.mark.parametrize("health", [False, True])
def test_every_line_comes_from_one_of_the_file(tmp_path, health):
    (tmp_path / "common.metal").write_text("\ninline float g(float x) {\n\n return x; }")
    made = parse(tmp_path / "t.metal", "k", "k", text=TEXT, health=health, omitted=("x",))
    header, body = made.file_lines
    assert len(header) == made.header.count("\n") and len(body) == made.source.count("\n") + 1
    cited = dict(zip((made.header + made.source).split("\n"), header + body, strict=True))
    assert cited["inline float g(float x){"] == "common.metal:2"
    assert cited["return x;}"] in ("common.metal:4", "t.metal:6")
    assert cited["const device float* x=nullptr;"] == "t.metal:9"
    assert cited["uint3 at=thread_position_in_grid;"] == "t.metal:9"
    assert cited["y[at.x]=f(1);"] == "t.metal:12"
    assert cited["y[at.y]=g(2);"] == "t.metal:16"


def test_messages_cite_the_file(tmp_path):
    made = parse(tmp_path / "t.metal", "k", "k", text=SHORT)
    text = f"{made.header}[[kernel]] void k(\n  parameters\n) {{\n{made.source}\n}}\n"
    line = text.split("\n").index("y[at.x]=f(1);") + 1
    assert made.cite(f"source.metal:{line}:3: error: no", text) == "t.metal:12: error: no"
    assert made.cite("source.metal:1: a, source.metal:2: b", text) == "t.metal:5: a, t.metal:6: b"
    # The parameter list is MLX's; behind the body nothing is the user's.
    assert made.cite("source.metal:4", text) == "t.metal:9"
    assert made.cite(f"source.metal:{line + 9}", text) == "t.metal:16"
