"""Any two values meet in a row; the first rows have every value."""

from __future__ import annotations

import doctest
from itertools import combinations, product

import pairwise as module
import pytest
from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 3, 4), (7, 5, 3, 6), (24, 3, 2, 3, 2)])
def test_any_two_values_meet(sizes: tuple[int, ...]) -> None:
    rows = pairwise(*map(range, sizes))
    for (i, a), (j, b) in combinations(enumerate(sizes), 2):
        met = {(row.values[i], row.values[j]) for row in rows}
        assert met == set(product(range(a), range(b)))
    quick = [row.values for row in rows if not row.marks]
    assert [len(set(values)) for values in zip(*quick, strict=True)] == list(sizes)
    assert len(rows) <= 1.1 * max(a * b for a, b in combinations(sizes, 2))


def test_example() -> None:
    assert doctest.testmod(module).failed == 0
