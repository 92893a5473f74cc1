"""A .metal file is read, and only what a kernel uses is taken from it."""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_qlayers.runtime import source
from mlx_qlayers.runtime.source import SourceError, minify, tokenize

MLX_KERNELS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"


def words(text):
    return [token.text for token in tokenize(text) if token.kind != "newline"]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("// caf\u00e9", "test.metal:1: Metal sources must be ASCII"),
        ("\n#include <metal_tensor>", "test.metal:2: cannot include <metal_tensor>"),
        ('#include "no.metal"', 'cannot include "no.metal"'),
        ("#ifdef A", "not in the dialect"),
        ("float operator x;", "test.metal:1: this operator takes nothing"),
        ("namespace n {}", "namespaces are not in the dialect"),
        ("struct S {\n int a;", "test.metal:1: this declaration does not end"),
    ],
)
def test_texts_outside_the_dialect(tmp_path, text, message):
    (tmp_path / "test.metal").write_text(text + "\n")
    with pytest.raises(SourceError, match=re.escape(message)):
        source.read(tmp_path / "test.metal")


def test_a_file_that_changed_is_read_again(tmp_path):
    path = tmp_path / "test.metal"
    for name in ("one", "other"):
        path.write_text(f"constant int {name} = 1;")
        assert [item.names for item in source.read(path)] == [{name}]
