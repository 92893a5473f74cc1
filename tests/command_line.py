"""The command as a process, and what it says."""

import sys

COMMAND = [sys.executable, "-m", "mlx_qlayers"]
PROMPT = "Once upon a time"


def complaints(stderr: bytes) -> list[bytes]:
    """The output of a command, besides the line that it compiles a kernel for the first time."""
    return [line for line in stderr.splitlines() if b"compiling kernel" not in line]
