"""A .metal file is read, and only what a kernel uses is taken from it."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_qlayers.runtime import program, source
from mlx_qlayers.runtime.source import SourceError, minify, tokenize

from .kernels import FILE

KERNEL = "[[kernel]] void k(device float* y, uint i [[thread_position_in_grid]]) {BODY}"
MLX_KERNELS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"


def load(tmp_path, text, body="y[i] = f(i);", name="k"):
    path = tmp_path / "test.metal"
    path.write_text(text + "\n" + KERNEL.replace("BODY", body))
    return program.load(path, name, name)


def words(text):
    return [token.text for token in tokenize(text) if token.kind != "newline"]


def test_comments_and_blanks_are_left_out():
    text = "a  =  b ;  // c\n\n\n   /* d\n e */ return  x + +y - -z / *p; // f"
    assert minify(tokenize(text)) == "a=b;\nreturn x+ +y- -z/ *p;"


def test_directives_keep_their_lines():
    text = "for (;;) {\n  #pragma clang loop unroll(full) // all\n  x  += 1;\n}"
    assert minify(tokenize(text)) == "for(;;){\n#pragma clang loop unroll(full)\nx+=1;\n}"


def test_macros_of_several_lines_become_one():
    text = "#define F(x) /* twice */ \\\n   (x + \\\n x)\nint y;"
    assert minify(tokenize(text)) == "#define F(x) (x + x)\nint y;"


def test_strings_and_numbers_stay_whole():
    text = 'f ( "a  // b" , 1.5e-3f , 0x1p-2 , .5h , 7u , a.b );'
    assert minify(tokenize(text)) == 'f("a  // b",1.5e-3f,0x1p-2,.5h,7u,a.b);'


marks = st.sampled_from("+-*&|<>=:!%^.,;(){}[]?~")
pieces = st.one_of(marks, st.sampled_from(["x", "1", "0.5f", ".5", "if", "::", "->", ">>=", "&&"]))


@given(st.lists(st.tuples(pieces, st.sampled_from(["", " ", "\n", "\t "]))))
def test_minified_text_has_the_same_words(parts):
    text = "".join(piece + blank for piece, blank in parts)
    short = minify(tokenize(text))
    assert words(short) == words(text)
    # Two marks are one operator only where they were neighbours before.
    for operator in ("::", "->", ">>", "<<", "&&", "||", "++", "--", "==", "//", "/*"):
        assert short.count(operator) <= text.count(operator)


@pytest.mark.parametrize("path", sorted(MLX_KERNELS.glob("*.h"))[::3], ids=lambda path: path.name)
def test_minifying_mlx_headers_changes_no_word(path):
    text = path.read_bytes().decode("ascii", "replace")
    assert words(minify(tokenize(text))) == words(text)


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


def test_what_a_function_of_mlx_needs_is_found(tmp_path):
    """MLX's largest header, less the directives that the dialect does not have."""
    text = (MLX_KERNELS / "quantized.h").read_bytes().decode("ascii", "ignore")
    path = tmp_path / "quantized.metal"
    path.write_text(re.sub(r"^#(?:.*\\\n)*.*$", "", text, flags=re.M))
    found = source.used(source.read(path), frozenset(["qmv_fast_impl"]))
    assert [min(item.names) for item in found] == [
        "SIMD_SIZE",
        "get_pack_factor",
        "get_bytes_per_pack",
        "load_vector",
        "qdot",
        "qmv_fast_impl",
    ]


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
    assert program.load(path, "k", "k").source == (
        "uint2 at=uint2(thread_position_in_grid.x,thread_position_in_grid.y);\n"
        "ushort lane=thread_index_in_simdgroup;\n"
        "y[at.x+lane+threadgroup_position_in_grid.x]=at.y;"
    )


def test_the_test_kernels_are_read_as_written():
    made = program.load(FILE, "affine", "affine")
    assert made.template == (("T", "typename"), ("N", "int"), ("NEGATE", "bool"))
    assert [(p.name, p.type, p.space, p.reference) for p in (*made.inputs, *made.outputs)] == [
        ("x", "T", "device", False),
        ("a", "float", "constant", True),
        ("b", "float", "constant", False),
        ("y", "T", "device", False),
    ]
    assert re.findall(r"float (\w+)\(", made.header) == ["wide", "load"]
    assert not made.cooperative
    assert program.load(FILE, "row_sums", "row_sums").cooperative
    assert program.load(FILE, "histogram", "histogram").atomic_outputs
    assert "health" not in program.load(FILE, "roots", "roots").source


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
        program.load(path, "k", "k")
    assert "bad.metal" in str(caught.value)


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
        program.load(path, "k", "k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("// caf\u00e9", "test.metal:1: Metal sources must be ASCII"),
        ("\n#include <metal_tensor>", "test.metal:2: cannot include <metal_tensor>"),
        ('#include "no.metal"', 'cannot include "no.metal"'),
        ("#ifdef A", "not in the dialect"),
        ("namespace n {}", "namespaces are not in the dialect"),
    ],
)
def test_texts_outside_the_dialect(tmp_path, text, message):
    with pytest.raises(SourceError, match=re.escape(message)):
        load(tmp_path, text)


def test_a_declaration_that_does_not_end(tmp_path):
    path = tmp_path / "test.metal"
    path.write_text("struct S {\n int a;\n")
    with pytest.raises(SourceError, match=re.escape("test.metal:1: this declaration does not end")):
        source.read(path)


def test_a_missing_kernel_names_those_that_exist():
    with pytest.raises(SourceError, match="no kernel 'sum', only affine, gather, histogram"):
        program.load(FILE, "sum", "sum")
