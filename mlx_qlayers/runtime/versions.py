"""The versions of packages, which results and proofs are kept for."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import mlx.core as mx

MLX: str = cast(Any, mx).__version__


@cache
def version_of(package: str) -> str:
    """The version of a package; an app that was bundled without its metadata has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
