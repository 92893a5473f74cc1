"""Pretends that a machine has other backends than it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import mlx_qlayers.runtime.backend as backend
from mlx_qlayers.runtime.proof import trial

ALL = ("metal", "cuda", "host")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that exactly these backends can run; plans made meanwhile are not used again."""

    def pretend(*names: str) -> None:
        for name in ALL:
            why = None if name in names else f"no {name} here"
            monkeypatch.setitem(backend.missing, name, lambda why=why: why)
        backend.advance_epoch()

    with trial():  # launches that nobody proves, where they are counted and not made
        yield pretend
    backend.advance_epoch()
