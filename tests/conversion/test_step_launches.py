"""A token of small models takes the kernels that it took when the list was written."""

from __future__ import annotations

import pytest
from step_launches import NAMES, launches, like_a_gpu, recorded
from step_models import pair


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_a_token(name: str) -> None:
    with like_a_gpu():
        assert launches(pair(name)[1]) == recorded()[name]
