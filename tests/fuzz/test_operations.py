"""Random calls of the operations of the table, on all backends, against float64; and of those
whose arguments a signature declares, all that it allows.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from mlx_qlayers.runtime.backend import BackendError
from tests.examples import RANDOM, in_float32, is_float
from tests.examples.arrays import LAYOUTS, SEEDS, laid_out, running, same_answers
from tests.examples.declared import DECLARED, Declared
from tests.fuzz.target import fuzz
from tests.numerics import EPSILON, to64

TARGETS = {
    f"test_{name}": fuzz(each.cases, examples=each.examples)(each.check)
    for name, each in RANDOM.items()
}
globals().update(TARGETS)


@fuzz(
    st.builds(
        SimpleNamespace,
        number=st.integers(0, len(DECLARED) - 1),
        seed=SEEDS,
        layouts=st.tuples(*[LAYOUTS] * 9),
    ),
    examples=100,
    seconds=5.0,
)
def test_declared(case: SimpleNamespace) -> None:
    """Shapes, dtypes, numbers and what may be None: all backends take them, and agree."""
    each = DECLARED[case.number]
    values = each.drawn(np.random.default_rng(case.seed))
    for (name, value), layout in zip(values.items(), case.layouts, strict=False):
        values[name] = laid_out(value, layout) if isinstance(value, mx.array) else value
    said = same_answers(partial(each, **values), [*values, *each.more])
    assert said == "accepted", f"{each.function.__name__} refuses {values}"
    if each.compared:
        for backend in ("auto", "host"):
            _compare(each, values, backend)


def _compare(each: Declared, values: dict[str, Any], backend: str) -> None:
    """Hold results against the reference's in float32, by roundings of the coarsest dtype."""
    arrays = {name: a for name, a in values.items() if isinstance(a, mx.array)}
    wide = dict(zip(arrays, in_float32([*arrays.values()]), strict=True))
    unit = max(EPSILON.get(a.dtype, 0) for a in arrays.values())
    try:
        with running("reference"):
            exact = mx.eval(given := each(**values | wide)) or given
        with running(backend):
            found = mx.eval(given := each(**values)) or given
    except BackendError:
        return
    both = ([y] if isinstance(y, mx.array) else y for y in (found, exact))
    for y, truth in zip(*both, strict=True):
        if is_float(y) and (sure := np.abs(to64(truth)) < 0.99 * mx.finfo(y.dtype).max).any():
            wrong, large = np.abs(to64(y) - to64(truth))[sure], np.abs(to64(truth))[sure].max()
            assert (wrong <= 32 * unit * max(1, large)).all(), f"{backend}: {wrong.max()} {values}"
