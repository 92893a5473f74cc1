"""Compiled kernels on disk: one folder for each content, complete or absent, whoever builds it."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from ..backend import ToolchainError
from ..cache_folder import cache_folder, check_owner, make_folder, own_folder
from ..staging import locked_directory, remove, remove_leftovers, staged_directory, turn

# Bytes that a compilation may need: on a full disk the compiler stops without a word.
_ROOM = 16 << 20
# In an entry: its name, and the sizes and digests of its files.
_CHECKSUMS = "checksums"

_clock = threading.Lock()
_building, _since, _built = 0, 0.0, 0.0


def seconds() -> float:
    """In how many seconds of this process something was built, by one thread or several."""
    return _built


@contextmanager
def _timed() -> Iterator[None]:
    global _building, _since, _built
    with _clock:
        _since = _since if _building else time.monotonic()
        _building += 1
    try:
        yield
    finally:
        with _clock:
            _building -= 1
            _built += 0 if _building else time.monotonic() - _since


def root() -> Path:
    """The folder of this backend's part of the cache, or one that goes when the process ends."""
    try:
        return _opened(cache_folder())
    except OSError as error:
        return _scratch(str(error))


@functools.cache
def _opened(cache: Path) -> Path:
    folder = own_folder("host")
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise PermissionError(f"{cache} is on a file system that is mounted noexec")
    remove_leftovers(folder, ".*")
    return folder


def _scratch(why: str) -> Path:
    """A folder of this process alone, which goes when it ends."""
    if not _made_scratch.cache_info().currsize:
        print(f"mlx-qlayers: kernels are not kept: {why}", file=sys.stderr)
    return _made_scratch()


@functools.cache
def _made_scratch() -> Path:
    parent, prefix, process = Path(tempfile.gettempdir()), "mlx-qlayers-kernels-", os.getpid()
    remove_leftovers(parent, prefix + "????????")
    folder, _ = locked_directory(prefix, parent)

    # A forked child ends too, and must leave the folder to its parent.
    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def entry(name: str, build: Callable[[Path], None]) -> Path:
    """The folder called ``name``, a hash of its inputs; built if it is not there or damaged.

    While another process builds it, this one waits. Without a cache it ends with the process.
    """
    try:
        return _entry(root() / name, build)
    except OSError as error:
        why = str(error)
    try:
        return _entry(_scratch(why) / name, build)
    except OSError as error:
        raise ToolchainError(f"there is no place for a compiled kernel: {error}") from error


def _entry(folder: Path, build: Callable[[Path], None]) -> Path:
    if _damage(folder) is None:
        return folder
    make_folder(folder.parent)
    with turn(folder.with_name(f".{folder.name}.lock")):
        if (damage := _damage(folder)) is None:
            return folder
        if os.path.lexists(folder):
            print(f"mlx-qlayers: {damage}; it is built anew", file=sys.stderr)
            remove(folder)
        if shutil.disk_usage(folder.parent).free < _ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
        try:
            with staged_directory(folder, 0o755) as work, _timed():
                build(work)
                for path in work.iterdir():
                    path.chmod(0o644)
                checksums = work / _CHECKSUMS
                checksums.write_bytes(_checksums(folder.name, _files(work)))
                checksums.chmod(0o644)
        except OSError:
            # Without locks another process may be first; its content is the same.
            if _damage(folder) is not None:
                raise
    return folder


def _damage(folder: Path) -> str | None:
    """Why an entry cannot be loaded, or None where it can."""
    try:
        check_owner(folder)
        files = _files(folder)
    except OSError as error:
        return str(error)
    whole = files.pop(_CHECKSUMS, None) == _checksums(folder.name, files)
    return None if whole else f"{folder} is damaged"


def _files(folder: Path) -> dict[str, bytes]:
    files = {}
    # Every kernel that is loaded passes here: pathlib would take twice as long.
    for name in sorted(os.listdir(folder)):
        path = f"{folder}/{name}"
        check_owner(path)
        with open(path, "rb", buffering=0) as file:
            files[name] = file.read()
    return files


def _checksums(name: str, files: dict[str, bytes]) -> bytes:
    lines = [f"{key} {len(data)} {sha256(data).hexdigest()}" for key, data in files.items()]
    return "\n".join([name, *lines]).encode()
