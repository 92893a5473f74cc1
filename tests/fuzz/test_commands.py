"""Command lines that nobody would type."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from unicodedata import category
from unittest import mock

from hypothesis import strategies as st

from mlx_qlayers import cli
from tests.fuzz.target import fuzz

_COMMANDS = ["generate", "chat", "server", "lora", "convert", "tune", "bench", "info", "demo"]
_COMMANDS += ["quantize", "perplexity"]
_OPTIONS = [
    "--model",
    "--prompt",
    "--max-tokens",
    "--temp",
    "--seed",
    "--stock",
    "--no-fuse",
    "--no-calibrate",
    "--backend",
    "--hf-path",
    "--mlx-path",
    "--mode",
    "--group-size",
    "--bits",
    "--dtype",
    "--budget",
    "--beam",
    "--list",
    "--clear",
    "--quick",
    "--only",
    "--out",
    "--from",
    "--traceback",
    "--help",
    "-h",
    "--version",
    "--trust-remote-code",
    "--prompt-tokens",
    "--batch",
    "--method",
    "--bits-per-weight",
    "--samples",
    "--sequence-length",
    "--damping",
    "--reference",
    "--",
    "-",
]
_VALUES = st.one_of(
    st.sampled_from(["", " ", "0", "-1", "1e999", "nan", "99999999999999999999", "/no/where"]),
    st.sampled_from(["\udcff", "\x1b[31m", "\x00", "a\nb", "é" * 2000, "%s", "{}", "@f"]),
    st.text(max_size=8),
)


@dataclass(frozen=True)
class Line:
    """The arguments after the command's name."""

    arguments: tuple[str, ...]


_WORD = st.one_of(st.sampled_from(_OPTIONS), _VALUES, st.sampled_from(_COMMANDS))
_LINES = st.tuples(
    st.one_of(st.sampled_from(_COMMANDS), st.sampled_from(_COMMANDS), _VALUES),
    st.lists(_WORD, max_size=6),
).map(lambda both: Line((both[0], *both[1])))


@fuzz(_LINES, examples=40)
def test_command_lines(case: Line) -> None:
    """What is understood is not run: the commands' own tests do that."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        for module in cli._COMMANDS:
            stack.enter_context(mock.patch.object(module, "run", lambda args: None))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(error))
        code = cli.main(case.arguments)
    assert code in (0, 2), code
    if code == 2:
        text = error.getvalue()
        assert text.startswith("mlx-qlayers") and text.endswith("\n"), text
        assert text.count("\n") == 1, text
        odd = [c for c in text if category(c) == "Cc" and c != "\n"]
        assert not odd, f"prints {odd[:3]}"
