"""Random products with matrices of a small rank, by float64."""

from types import SimpleNamespace

import numpy as np

from mlx_qlayers.ops.add_low_rank import _TAKES, add_low_rank
from tests.examples.arrays import DTYPES, dtype_of, filled, placed
from tests.examples.calls import Call, Numbers, Random, declared
from tests.examples.products import ROWS
from tests.numerics import random
from tests.oracles import product, sums

_NAMES = "y", "x", "a", "b"
_SCALE = 0.75


def _add_low_rank(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, kind, (n, k, rank) = dtype_of(case.dtype), dtype_of(case.matrices), case.sizes
    operands = (
        filled(rng, (*case.rows, n), dtype, case.values),
        filled(rng, (*case.rows, k), dtype, case.values),
        random(rng, (k, rank), kind),
        random(rng, (rank, n), kind),
    )
    given = placed(_NAMES, operands, case.layouts)

    def expected(numbers: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        y, x = numbers["y"].reshape(-1, n), numbers["x"].reshape(-1, k)
        a, b, s = numbers["a"], numbers["b"], y.dtype.type(_SCALE)
        low, of_low = product(x, a), sums(x, a, np.abs(a))
        found = {"0": (y + s * product(low, b)).reshape((*case.rows, n))}
        terms = {"0": np.abs(y) + s * sums(low, b, np.abs(b)) + s * of_low @ np.abs(b)}
        # Sums on the way that float32 does not hold: times zero they would be no number.
        terms["0"] = terms["0"] + np.where(of_low.max(-1, keepdims=True) < 1e37, 0, np.inf)
        if up:
            dy = up[0].reshape(-1, n)
            back, of_back = product(dy, b.T), sums(dy, b.T, np.abs(b.T))
            found |= {"y": up[0], "x": (s * product(back, a.T)).reshape((*case.rows, k))}
            found |= {"a": s * product(x.T, back), "b": s * product(low.T, dy)}
            terms |= {"y": np.abs(dy), "a": s * (sums(x.T, back, np.abs(back)))}
            terms["a"] = terms["a"] + s * np.abs(x.T) @ of_back
            terms["x"] = s * (sums(back, a.T, np.abs(a.T)) + of_back @ np.abs(a.T))
            terms["b"] = s * (sums(low.T, dy, np.abs(dy)) + of_low.T @ np.abs(dy))
        of_rows = {name: terms[name].reshape(found[name].shape) for name in terms}
        return found, of_rows

    return Call(
        add_low_rank,
        given,
        {"scale": _SCALE},
        (*case.rows, n),
        expected,
        _NAMES if case.values == "normal" else (),
        rank <= 32 and given["y"].size > 0 and given["x"].size > 0,
    )


ADD_LOW_RANK = Random(
    {
        "rows": ROWS,
        "sizes": [(37, 65, 8), (1, 1, 1), (8, 3, 12), (130, 260, 32), (1030, 40, 3), (5, 70, 33)],
        "dtype": ("float32", DTYPES),
        "matrices": ("float32", DTYPES),
        "values": ["normal", "normal", "zeros", "special"],
    }
    | declared(_TAKES),
    _add_low_rank,
    [
        {"rows": (130,), "sizes": (41, 300, 9), "dtype": "bfloat16"},
        {"rows": (2, 5), "sizes": (1030, 7, 16), "dtype": "float16", "matrices": "bfloat16"},
        {"rows": (257,), "sizes": (8, 24, 32), "matrices": "float16"},
        {"rows": (), "sizes": (3, 5, 2), "dtype": "bfloat16", "matrices": "bfloat16"},
        {"rows": (7,), "sizes": (5, 70, 33)},
        {"rows": (40,), "values": "special"},
        {"rows": (0,)},
    ],
)
