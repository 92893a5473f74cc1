"""Compiled kernels on disk: one folder for each content, complete or absent, whoever builds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from ..cache_folder import cache_folder
from . import toolchain

# What a compilation may need: on a full disk the compiler stops without a word.
_ROOM = 16 << 20
# The modules that decide whether a kernel is taken, and which object is made of it.
_MAKERS = (
    *("access_checks", "alu_cycles", "compiler", "cpp_text", "lint", "llvm_ir"),
    *("opencl_spelling", "runtime_library", "toolchain", "translate"),
)


def root() -> Path:
    """The folder of this backend's part of the cache."""
    return cache_folder() / "host"


@functools.cache
def _own(unusable: Path, why: str) -> Path:
    """A folder of this process alone, in the place of one that cannot be written."""
    print(f"mlx-qlayers: kernels are not kept, {unusable} is unusable: {why}", file=sys.stderr)
    return toolchain.scratch() / "host"


@functools.cache
def _processor() -> str:
    """What the compiler sees of this machine: objects are built for exactly this processor."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = info.split("\n\n")[0].splitlines()
    return "\n".join(x for x in lines if x.split(":")[0].strip() in ("flags", "Features", "model"))


@functools.cache
def _surroundings() -> str:
    """Everything but the kernel that decides what the compiler makes of it."""
    digest = hashlib.sha256()
    makers = [Path(__file__).with_name(f"{name}.py") for name in _MAKERS]
    for path in [*makers, *sorted(p for p in toolchain.SHIMS.iterdir() if p.is_file())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return (
        f"{toolchain.version()} {toolchain.target()} {_processor()} {metadata.version('mlx')} "
        + (digest.hexdigest())
    )


def key(*parts: object) -> str:
    """The name under which the content described by ``parts`` is stored."""
    text = "\0".join([_surroundings(), *map(repr, parts)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _work(folder: Path) -> Path:
    """An empty folder beside ``folder``, to become it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process at a time builds a folder; the system ends the turn of one that is killed."""
    path = folder.with_suffix(".lock")
    with open(path, "w") as lock:
        # Some file systems have no locks: then each builds, and the first is kept.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            # A forked child may hold the file open for longer.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def entry(name: str, build: Callable[[Path], None]) -> Path:
    """The folder called ``name``, built first if it is not there.

    While another process builds it, this one waits. Where the cache cannot be written it lives as
    long as the process.

    Args:
        name: from :func:`key`.
        build: fills an empty folder; what it leaves appears under ``name`` all at once.
    """
    folder = root() / name[:2] / name
    if folder.is_dir():
        return folder
    try:
        work = _work(folder)
    except OSError as error:
        folder = _own(root(), error.strerror or str(error)) / name
        if folder.is_dir():
            return folder
        work = _work(folder)
    try:
        with _turn(folder):
            if not folder.is_dir():
                build(work)
                try:
                    work.rename(folder)
                except OSError:
                    # Another process was first; its content is the same.
                    if not folder.is_dir():
                        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
