"""The conformance set: what a backend must do with every function that kernels may call.

Each ``.metal`` file here has a table beside it: the launches, and their outputs by NumPy.
"""

from . import groups, math, matrix, memory, types
from .case import Case, Part

__all__ = ["Case", "Part", "cases"]


def cases() -> list[Case]:
    """Every case, in the order of the files."""
    return [case for module in (groups, memory, types, math, matrix) for case in module.cases()]
