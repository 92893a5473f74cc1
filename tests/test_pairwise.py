"""Any two values meet in a row; the first rows have every value."""

import doctest
from itertools import combinations, product

import pairwise as module
import pytest
from pairwise import in_turn, pairwise


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 3, 4), (7, 5, 3, 6), (24, 3, 2, 3, 2)])
def test_any_two_values_meet(sizes):
    rows = pairwise(*map(range, sizes))
    for (i, a), (j, b) in combinations(enumerate(sizes), 2):
        met = {(row.values[i], row.values[j]) for row in rows}
        assert met == set(product(range(a), range(b)))
    quick = [row.values for row in rows if not row.marks]
    assert [len(set(values)) for values in zip(*quick, strict=True)] == list(sizes)
    assert len(rows) <= 1.1 * max(a * b for a, b in combinations(sizes, 2))


@pytest.mark.parametrize("sizes", [(28, 2, 3), (7, 3, 3, 2), (28, 2, 3, 3, 2)])
def test_rows_have_the_values_of_lists_in_turn(sizes):
    """All but the first two lists, whose pairs are the rows."""
    lists = [[(i, value) for value in range(size)] for i, size in enumerate(sizes)]
    rows = pairwise(*lists[:2])
    found = in_turn(rows, *lists[2:])
    assert [(row.values[:2], row.marks) for row in found] == [(r.values, r.marks) for r in rows]
    for i, j in combinations(range(1, len(sizes)), 2):
        met = {(row.values[i], row.values[j]) for row in found}
        assert met == set(product(lists[i], lists[j])), (i, j)


def test_example():
    assert doctest.testmod(module).failed == 0
