"""A directory that appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = ".mlx-qlayers-"


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
    prefix = f".{target.name}{_MARK}"
    for leftover in target.parent.glob(f"{_escape(prefix)}*"):
        _remove_unlocked(leftover)
    staging, lock = _locked(prefix, target.parent)
    try:
        yield staging
        for path in staging.rglob("*"):
            _sync(path)
        staging.chmod(0o777 & ~_umask())
        _sync(staging)
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


def _locked(prefix: str, parent: Path) -> tuple[Path, int]:
    while True:
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may take it for a leftover before it is locked.
        with suppress(FileNotFoundError):
            lock = os.open(staging, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if staging.exists():
                return staging, lock
            os.close(lock)


def _remove_unlocked(leftover: Path) -> None:
    with suppress(OSError):
        lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(lock)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
