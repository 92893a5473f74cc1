"""Captures what runs on an Apple GPU, for Xcode to show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx


@contextmanager
def capture(path: str | Path) -> Iterator[Path]:
    """Write a trace of the GPU's work in a ``with`` block, to be opened with Xcode.

    The process must have been started with ``MTL_CAPTURE_ENABLED=1``. Arrays that the
    block leaves unevaluated are not in the trace, so call ``mx.eval`` inside it.

    Args:
        path: a file that does not exist yet, whose name ends in ``.gputrace``.

    Raises:
        RuntimeError: there is no Metal here, or captures are not enabled.
        ValueError: the name does not end in ``.gputrace``.
        FileExistsError: the file exists; Metal does not overwrite it.

    Example:
        >>> from mlx_qlayers.ops.exp import exp
        >>> with capture("exp.gputrace"):
        ...     mx.eval(exp(mx.ones(16)))

    Source: "Metal Debugger" in MLX's documentation.
    """
    path = Path(path)
    if not mx.metal.is_available():
        raise RuntimeError("a GPU capture needs Metal: mx.metal.is_available() is false")
    if os.environ.get("MTL_CAPTURE_ENABLED") != "1":
        raise RuntimeError("a GPU capture needs MTL_CAPTURE_ENABLED=1 when the process starts")
    if path.suffix != ".gputrace":
        raise ValueError(f"path must end in .gputrace, not {str(path)!r}")
    if path.exists():
        raise FileExistsError(f"{path} exists, and Metal does not overwrite a capture")
    # Work that was queued before does not belong to the block.
    mx.synchronize()
    mx.metal.start_capture(str(path))
    try:
        yield path
        mx.synchronize()
    finally:
        mx.metal.stop_capture()
