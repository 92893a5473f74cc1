"""Operations of several launches that a GPU runs as one compiled graph.

This is all that conversion asks of the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ops.traced import Place as Context
from ..ops.traced import place as context
from ..ops.traced import traced as _compiled

__all__ = ["Context", "Operation", "context"]


class Operation:
    """A function of arrays, of which some may be None, for each set of static arguments.

    ``mx.compile`` traces it once for each backend, stream and thread, and for each shape of its
    first two arrays; the static arguments say what the others are.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]]) -> None:
        self.__doc__, self._bind = make.__doc__, _compiled(make)

    def bind(self, where: Context | None, *static: Any) -> Callable[..., Any]:
        """The function, compiled where :func:`context` says that calls are now; None does not."""
        return self._bind(where, *static)
