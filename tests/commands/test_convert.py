"""The command convert: what it prints, and where."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from pathlib import Path

from command_line import COMMAND, complaints


def test_progress_on_a_terminal_only(plain_model: Path, tmp_path: Path) -> None:
    arguments = [*COMMAND, "convert", "--hf-path", str(plain_model), "--mlx-path"]
    piped = subprocess.run([*arguments, str(tmp_path / "a")], capture_output=True, check=True)
    assert not complaints(piped.stderr)
    assert piped.stdout.decode().startswith(f"{tmp_path / 'a'}: 15 quantized layers")
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 100))
    with subprocess.Popen(
        [*arguments, str(tmp_path / "b")], stdout=subprocess.DEVNULL, stderr=secondary
    ) as process:
        os.close(secondary)
        shown = b""
        try:
            while chunk := os.read(primary, 1024):
                shown += chunk
        except OSError:  # how Linux reports that the other end was closed
            pass
        assert process.wait(60) == 0
    os.close(primary)
    assert b"quantizing: 100%" in shown
