"""The command as a process or in this one, and what it says."""

import contextlib
import io
import sys

from mlx_qlayers.cli import main

COMMAND = [sys.executable, "-m", "mlx_qlayers"]
PROMPT = "Once upon a time"


def complaints(stderr: bytes) -> list[bytes]:
    """The output of a command, besides the line that it compiles a kernel for the first time."""
    return [line for line in stderr.splitlines() if b"compiling kernel" not in line]


def outcome(*arguments: str) -> tuple[int, str, str]:
    """The exit code of a command in this process, its output, and what it says of errors."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(arguments)
    return code, out.getvalue(), error.getvalue()
