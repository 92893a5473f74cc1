"""Modules of any model that the conversion swaps: who registered which class for which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.nn as nn

Example = Callable[[Any], Sequence[Any]]


class Registration(NamedTuple):
    """A registration of a counterpart for a class."""

    stock: type[nn.Module]  # the class
    counterpart: type[nn.Module]  # what its modules become
    example: Example | None  # arguments of a call of a module, for the verification; or None


_by_stock: dict[type, Registration] = {}
_by_counterpart: dict[type, Registration] = {}


def register_counterpart(
    stock: type[nn.Module], counterpart: type[nn.Module], *, example: Example | None = None
) -> None:
    """Let ``convert_model`` swap modules of a class, wherever they are in a model.

    A module becomes the other by its class alone: every array, every reference to it and what is
    frozen stay, and ``revert_model`` gives the class back. Registering a class again replaces what
    was registered for it; subclasses are not swapped.

    Args:
        stock: a class of modules.
        counterpart: a subclass of it that computes the same from the same attributes. Its
            ``__init__`` does not run.
        example: from a module to the arguments of a call, with which the conversion compares the
            two before it swaps; without it they are not compared.

    Raises:
        ValueError: ``counterpart`` is no subclass of ``stock``, or no other class.

    Example:
        >>> from mlx_qlayers import convert_model, grid_sample
        >>> class Warp(nn.Module):  # somebody's, with gathers
        ...     def __call__(self, x, grid):
        ...         at = ((grid + 1) * mx.array(x.shape[2:0:-1]) / 2).astype(mx.int32)
        ...         return x[mx.arange(len(x))[:, None, None], at[..., 1], at[..., 0]]
        >>> class FastWarp(Warp):
        ...     def __call__(self, x, grid):
        ...         return grid_sample(x, grid, mode="nearest")
        >>> def example(warp):
        ...     return mx.random.normal((1, 5, 5, 3)), mx.random.uniform(-0.9, 0.9, (1, 2, 2, 2))
        >>> register_counterpart(Warp, FastWarp, example=example)
        >>> convert_model(nn.Sequential(Warp())).counts
        {'swapped': 1}
    """
    for name, cls in (("stock", stock), ("counterpart", counterpart)):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"{name} must be a class of modules, not {cls!r}")
    if stock is counterpart or not issubclass(counterpart, stock):
        raise ValueError(
            f"counterpart {counterpart.__name__} must be a subclass of {stock.__name__}"
        )
    registration = Registration(stock, counterpart, example)
    _by_stock[stock] = _by_counterpart[counterpart] = registration


def registered_for(cls: type) -> Registration | None:
    """The registration for modules of a class; None if there is none."""
    return _by_stock.get(cls)


def registered_as(cls: type) -> Registration | None:
    """For what a class was registered as the counterpart; None if it was not."""
    return _by_counterpart.get(cls)
