"""The arrays of linear layers side by side, so that a launch takes one instead of three to twelve.

What a launch takes costs the host as much as what it gives, see :mod:`~..runtime.windows`. So the
arrays of all linear layers that a module holds are put into one. They stay the objects that they
are, of the same numbers, wherever somebody has them: what they lie in is all that changes.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..layers.sharded import LINEARS
from ..runtime.windows import Window, share_arrays, side_by_side


def arranged(model: nn.Module) -> list[Window]:
    """Put the arrays of linear layers side by side, where launches can take them so."""
    if not share_arrays():
        return []
    windows = list[Window]()
    for part in model.modules():
        if arrays := _arrays(part):
            windows += side_by_side(arrays)
            # What they lay in before is of no size that anybody asks for.
            mx.clear_cache()
    return windows


def _arrays(part: nn.Module) -> list[mx.array]:
    linears = [each for each in part.values() if isinstance(each, LINEARS)]
    arrays = [a for each in linears for a in each.values() if isinstance(a, mx.array)]
    return [*{id(a): a for a in arrays if a.ndim and a.size}.values()]
