"""The first rounds of what ``make stress`` does a thousand times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import stress


@pytest.mark.parametrize("function", stress.ALL, ids=lambda function: function.__name__)
def test_nothing_is_lost(function: Callable[[int], None]) -> None:
    function(6 if function is stress.exits else 30)
