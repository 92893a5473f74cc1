"""Directories and files that appear whole or not at all, and what is left of those that did not."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_DAY = 24 * 3600


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path whose ``~`` is a home folder; unchanged, as in a shell, if nobody has that name."""
    return Path(os.path.expanduser(path))


@contextmanager
def staged_directory(target: Path, permissions: int | None = None) -> Iterator[Path]:
    """A new directory beside ``target`` that takes its place when the block ends without error.

    Until then it is named ``.NAME.mlx-qlayers-XXXXXXXX`` and locked. Leftovers of a killed
    process under such a name are removed by the next one that writes to the same target.

    Args:
        target: where the directory shall appear; nothing, or an empty directory, is there now.
        permissions: those of the directory; by default what the umask leaves.

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
    remove_leftovers(target.parent, f"{glob.escape(prefix)}*")
    staging, lock = locked_directory(prefix, target.parent)
    try:
        yield staging
        if permissions is None:
            os.umask(mask := os.umask(0))
            permissions = 0o777 & ~mask
        staging.chmod(permissions)
        for path in (*staging.rglob("*"), staging):
            _sync(path)
        check_free(target)
        staging.rename(target)
        _sync(target.parent)
    finally:
        remove_tree(staging, ignore_errors=True)
        os.close(lock)


def check_free(target: Path) -> None:
    """Raise a ``FileExistsError`` unless ``target`` is nothing or an empty directory."""
    if target.is_dir():
        if any(target.iterdir()):
            raise FileExistsError(f"{target}: exists and is not empty; choose another or remove it")
    elif os.path.lexists(target):
        raise FileExistsError(f"{target}: exists and is not a directory")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file that holds all of what is new or, where the process is killed, what it held."""
    remove_leftovers(path.parent, ".*.tmp")
    prefix, linked = f".{path.name[:80]}.", 0
    while not linked:  # somebody else may take it for a leftover before it is locked
        handle, name = tempfile.mkstemp(".tmp", prefix, path.parent)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if not (linked := os.fstat(handle).st_nlink):
            os.close(handle)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Delete what killed processes left: what this user owns and has not locked, or a day old."""
    oldest, user = time.time() - _DAY, os.geteuid()
    for path in map(folder.joinpath, glob.glob(pattern, root_dir=folder)):
        with suppress(OSError):
            info = path.lstat()
            lock, is_locked = _locked(path, fcntl.LOCK_NB)
            try:
                if info.st_uid == user and (is_locked or info.st_mtime < oldest):
                    remove(path)
            finally:
                os.close(lock)


def remove(path: Path) -> None:
    """Delete a file, or a directory with all that is in it."""
    remove_tree(path) if path.is_dir() else path.unlink()


def remove_tree(folder: Path, *, ignore_errors: bool = False) -> None:
    """``shutil.rmtree``, but an interrupt is never lost.

    It closes a folder a second time if an interrupt comes right after the first; that error would
    replace the KeyboardInterrupt, and a caller that ignores an OSError would go on.
    """
    try:
        shutil.rmtree(folder, ignore_errors=ignore_errors)
    except OSError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def locked_directory(prefix: str, parent: Path) -> tuple[Path, int]:
    """A new directory, and the handle that keeps it locked until it is closed."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may take it for a leftover before it is locked.
        with suppress(FileNotFoundError):
            lock, _ = _locked(staging)
            if staging.exists():
                return staging, lock
            os.close(lock)


def _locked(path: Path, flags: int = 0) -> tuple[int, bool]:
    """A handle that keeps a file or directory locked, and false where there are no locks."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        return handle, False
    return handle, True


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Let one process at a time into a ``with`` block; the system ends the turn of a killed one."""
    with _opened(lock) as file:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            # A forked child may hold the file open for longer.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _opened(lock: Path) -> TextIO:
    while True:
        file = open(lock, "w")  # noqa: SIM115 - the caller closes it
        # Some file systems have no locks: then all go in at once.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another process may have deleted it before it was locked, as done with or as a leftover.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                return file
        file.close()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
