"""How many Python functions a call enters that has been made before: each costs a tenth of a us."""

from __future__ import annotations

import pytest
from python_calls import calls, on, operations, token

OPERATION = 8
# On a GPU where nothing was measured, attention of a token is by stock operations.
TOKEN = {"host": 3000, "gpu": 750, "metal": 150}
CASES = [(path, name) for path in ("host", "gpu") for name in operations(path)]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_call_of_an_operation(path: str, name: str) -> None:
    with on(path):
        assert calls(operations(path)[name]) <= OPERATION


@pytest.mark.parametrize("path", TOKEN)
def test_a_token(path: str) -> None:
    with on(path):
        assert calls(token()) <= TOKEN[path]


def test_a_token_by_its_graph_on_a_cpu() -> None:
    """141 launches of kernels, 28 of rotary embeddings, and what a step does besides."""
    with on("host"):
        assert calls(token(by_graph=True)) <= 215
