"""A directory that appears whole or not at all."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """A new directory beside ``target`` that takes its place when the block ends without error.

    Until then it is named ``.NAME.mlx-qlayers-XXXXXXXX`` and locked. What a killed process left
    behind under such a name is removed by the next one that writes to the same target.

    Args:
        target: where the directory shall appear; nothing, or an empty directory, is there now.

    Raises:
        FileExistsError: ``target`` is a file, or a directory with something in it.

    Example:
        >>> with staged_directory(Path("model")) as staging:
        ...     _ = (staging / "config.json").write_text("{}")
    """
    target = Path(os.path.realpath(target))
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.mlx-qlayers-"
    for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            lock = _locked(leftover, fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)
    staging, lock = _created(prefix, target.parent)
    try:
        yield staging
        os.umask(mask := os.umask(0))
        staging.chmod(0o777 & ~mask)
        for path in (*staging.rglob("*"), staging):
            _sync(path)
        check_free(target)
        staging.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def check_free(target: Path) -> None:
    """Raise a ``FileExistsError`` unless ``target`` is nothing or an empty directory."""
    if target.is_dir():
        if any(target.iterdir()):
            raise FileExistsError(f"{target}: exists and is not empty; choose another or remove it")
    elif os.path.lexists(target):
        raise FileExistsError(f"{target}: exists and is not a directory")


def _created(prefix: str, parent: Path) -> tuple[Path, int]:
    while True:
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may take it for a leftover before it is locked.
        with suppress(FileNotFoundError):
            lock = _locked(staging)
            if staging.exists():
                return staging, lock
            os.close(lock)


def _locked(path: Path, flags: int = 0) -> int:
    """A handle of a directory that is locked as long as it is open."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(handle)
        raise
    return handle


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
