"""Where the package keeps what it can make again: compiled kernels, results of the tuner."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ENVIRONMENT = "MLX_QLAYERS_CACHE_DIR"


def cache_folder() -> Path:
    """``MLX_QLAYERS_CACHE_DIR``, else this package's folder in the platform's place for caches."""
    if chosen := os.environ.get(_ENVIRONMENT):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-qlayers"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-qlayers"
