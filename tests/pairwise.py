"""Rows of test parameters in which any two values of two lists meet, far fewer than all rows."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*lists: Sequence[Any]) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: one value of each list in a row.

    Whatever two values of two lists do together, some row tests. The first rows take each value of
    each list at least once; those behind them are marked thorough.

    Example:
        >>> [row.values for row in pairwise("abc", (1, 2), "x")]
        [('a', 1, 'x'), ('b', 2, 'x'), ('c', 1, 'x'), ('a', 2, 'x'), ('b', 1, 'x'), ('c', 2, 'x')]
    """
    sizes = [len(values) for values in lists]
    rows = [tuple(n % size for size in sizes) for n in range(max(sizes))]
    pairs = {row: set(combinations(enumerate(row), 2)) for row in product(*map(range, sizes))}
    missing = set().union(*pairs.values()).difference(*(pairs[row] for row in rows))
    used = Counter(value for row in rows for value in enumerate(row))
    while missing:
        # Of those that add most pairs, the row of the values used least.
        row = max(pairs, key=lambda r: (len(missing & pairs[r]), -sum(map(used.get, enumerate(r)))))
        missing -= pairs[row]
        used.update(enumerate(row))
        rows.append(row)
    return [
        pytest.param(
            *(values[i] for values, i in zip(lists, row, strict=True)),
            marks=pytest.mark.thorough if n >= max(sizes) else (),
        )
        for n, row in enumerate(rows)
    ]


def in_turn(rows: Sequence[Any], *lists: Sequence[Any]) -> list[Any]:
    """The rows of :func:`pairwise`, each with one value more of each list.

    Whatever two values of these lists do together, some row tests, if there are rows enough; a
    value of the rows meets those of the lists as evenly as can be, but not each. It is for values
    that have nothing to do with each other, where a row is expensive.

    Example:
        >>> [row.values for row in in_turn(pairwise("abcd"), (1, 2), "xy")]
        [('a', 1, 'x'), ('b', 2, 'y'), ('c', 1, 'y'), ('d', 2, 'x')]
    """
    others, used = [row.values for row in pairwise(*lists)], Counter[Any]()
    found = []
    for row in rows:
        # Values may not be hashable.
        meets = [[(id(a), id(b)) for a, b in product(row.values, other)] for other in others]
        costs = [(used[n], sum(map(used.__getitem__, pairs))) for n, pairs in enumerate(meets)]
        best = min(range(len(others)), key=costs.__getitem__)
        used.update([best, *meets[best]])
        found.append(pytest.param(*row.values, *others[best], marks=row.marks))
    return found
