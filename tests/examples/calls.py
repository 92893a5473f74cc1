"""What sound and invalid calls of an operation are."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple


class Calls(NamedTuple):
    """Sound calls of an operation and invalid ones.

    Attributes:
        function: the operation.
        arguments: of sound calls. What else the operation takes has its default.
        invalid: changes to the first of these, and a pattern of what is said.
    """

    function: Callable[..., Any]
    arguments: list[dict[str, Any]]
    invalid: list[tuple[dict[str, Any], str]]

    def sound(self, number: int = 0) -> dict[str, Any]:
        """All arguments of a sound call."""
        parameters = signature(self.function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not Parameter.empty}
        given = self.arguments[number % len(self.arguments)]
        return given | {name: value for name, value in defaults.items() if name not in given}
