"""Where the package keeps what it can make again: compiled kernels, results of the tuner."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ENVIRONMENT = "MLX_QLAYERS_CACHE_DIR"


def cache_folder() -> Path:
    """``MLX_QLAYERS_CACHE_DIR``, else this package's folder in the platform's place for caches."""
    try:
        if chosen := os.environ.get(_ENVIRONMENT):
            return Path(chosen).expanduser()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "mlx-qlayers"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-qlayers"
    except RuntimeError as error:
        raise OSError(f"{error} Set {_ENVIRONMENT}") from None


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, for others to read and not to write whatever the umask."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(0o755, exist_ok=True)


def check_owner(path: str | Path) -> None:
    """Refuse files that others could have written, as OpenSSH does: this user would run them."""
    info = os.stat(path)
    if info.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {info.st_uid}")
    if info.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by other users: chmod go-w {path}")


def own_folder(name: str) -> Path:
    """A folder of the cache, which only this user may write to; made if it is not there."""
    folder = cache_folder() / name
    make_folder(folder)
    check_owner(folder.parent)
    check_owner(folder)
    return folder
