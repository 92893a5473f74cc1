"""Messages between the ranks of a distributed group."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

Group = mx.distributed.Group


class RanksError(ValueError):
    """An error that all ranks of a group raise, with the same message."""


def gathered(group: Group, text: str) -> list[str]:
    """Gather a text from each rank, in their order. All ranks make this call."""
    # The step that mlx-lm computes ahead has messages that would mix with this stream's.
    if generate := sys.modules.get("mlx_lm.generate"):
        mx.synchronize(generate.generation_stream)
    data = text.encode()
    sizes: Any = mx.distributed.all_gather(mx.array([len(data)]), group=group).tolist()
    width = max(*sizes, 1)
    padded = mx.array([*data, *bytes(width - len(data))], mx.uint8)
    rows: Any = mx.distributed.all_gather(padded, group=group).reshape(-1, width).tolist()
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


@contextmanager
def raising_on_all_ranks(group: Group) -> Iterator[None]:
    """Let an error of one rank raise a RanksError on all, which names the first such rank."""
    if group.size() == 1:
        yield
        return
    own: Exception | None = None
    try:
        yield
    except RanksError:
        raise
    except Exception as error:
        own = error
    said = "" if own is None else f"{type(own).__name__}: {own}"
    for rank, error_text in enumerate(gathered(group, said)):
        if error_text:
            raise RanksError(f"rank {rank}: {error_text}") from own


def check_same(group: Group, facts: Mapping[str, str]) -> None:
    """Raise a RanksError on every rank unless all have the same facts, by names for the message."""
    names, values = list(facts), gathered(group, "\n".join(facts.values()))
    for rank, value in enumerate(values):
        pairs = zip(names, value.split("\n"), values[0].split("\n"), strict=True)
        if other := [
            f"{name} ({ours}, not {first})" for name, ours, first in pairs if ours != first
        ]:
            raise RanksError(f"rank {rank} differs from rank 0: {', '.join(other)}")
