"""Adds the health buffer of the debug mode to a kernel function, or takes its checks out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .source import Token, position, tokenize

_CHECK = "health_check"
_WORDS = "(device atomic<uint>*)health"
_PARAMETERS = (
    ", device {type}* health, uint3 thread_position_in_grid [[thread_position_in_grid]], "
    "uint3 threads_per_grid [[threads_per_grid]]"
)
_START = f"health_start({_WORDS}, threads_per_grid);\n"
_REPORT = f"health_report({_WORDS}, thread_position_in_grid, threads_per_grid, "
_FINISH = f"health_finish({_WORDS});"


def _added(text: str) -> Iterator[Token]:
    """Tokens that are in no line of the file."""
    return (token._replace(line=0) for token in tokenize(text))


def without_health(function: Iterable[Token]) -> tuple[Token, ...]:
    """The function without its ``health_check(...);`` statements."""
    kept: list[Token] = []
    inside = False
    for token in function:
        inside = inside or token.text == _CHECK
        if not inside:
            kept.append(token)
        elif token.text == ";":
            inside = False
    return tuple(kept)


def with_health(function: Sequence[Token]) -> tuple[Token, ...]:
    """The function with one more output, which tells how far its threads came."""
    opened = position(function, "{")
    closed = max(i for i, token in enumerate(function[:opened]) if token.text == ")")
    # MLX makes all outputs atomic or none.
    atomic = any(token.text.startswith("atomic") for token in function[:opened])
    parameters = _PARAMETERS.format(type="atomic<uint>" if atomic else "uint")
    return (
        *function[:closed],
        *_added(parameters),
        *function[closed : opened + 1],
        *_added(_START),
        *_body(function[opened + 1 : -1]),
        *_added(_FINISH),
        function[-1],
    )


def _body(body: Sequence[Token]) -> Iterator[Token]:
    """Turn each check into a report, and let a thread that returns early finish all the same."""
    replaced = iter(range(len(body)))
    for i in replaced:
        if body[i].text == _CHECK:
            yield from _added(_REPORT)
            next(replaced)
        elif body[i].text == "return":
            yield from _added("{" + _FINISH + "return;}")
            next(replaced)
        else:
            yield body[i]
