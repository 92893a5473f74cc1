"""The versions of packages, which results and proofs are kept for."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import mlx.core as mx


@cache
def version_of(package: str) -> str:
    """The version of a package; an app that was bundled without its metadata knows MLX's alone."""
    if package == "mlx":
        return str(cast(Any, mx).__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
