"""What runs under compute-sanitizer: a module for each family of kernels, found by its name.

A module has one function, ``cases()``: the name of each case and what runs it. The run launches
kernels of this package on the current backend and raises where a result is wrong. Together the
cases launch every kernel in every mode that gives it other code, on awkward shapes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module

Cases = Iterable[tuple[str, Callable[[], None]]]


def families() -> dict[str, Callable[[], Cases]]:
    """What lists the cases of each family, by the family's name."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return {name: import_module(f"{__name__}.{name}").cases for name in names}
