"""The conformance set on the backends that run here: what they must agree on, they agree on."""

import mlx.core as mx
import numpy as np
import pytest

from tests.gpus import GPUS

from .conformance import cases
from .conformance.case import to_bfloat16

CASES = cases()
BACKENDS = ["host", *GPUS]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_conforms(case, backend, record_property):
    parts = case.compare(case.run(backend))
    wrong = [str(part) for part in parts if not part.passed]
    far = max(parts, key=lambda part: part.distance)
    said = f"{len(parts) - len(wrong)} of {len(parts)} right", f"{far.distance:g} ulp", far.name
    record_property("table: conformance to the language", [case.name, backend, *said])
    assert not wrong, "\n".join(wrong)


def test_the_set_covers_what_kernels_may_call():
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    parts = {
        (case.name.split("[")[0], part) for case in CASES for rows in case.expected for part in rows
    }
    assert len(parts) > 250


def test_a_wrong_output_is_seen():
    case = next(case for case in CASES if case.name == "math_exact")
    right = [np.concatenate([np.ravel(part) for part in rows.values()]) for rows in case.expected]
    assert all(part.passed for part in case.compare(right))
    for change in (lambda v: np.nextafter(v, np.float32(np.inf)), lambda v: v * np.nan):
        wrong = [right[0].astype(np.float32)]
        wrong[0][3] = change(wrong[0][3])
        failed = [part.name for part in case.compare(wrong) if not part.passed]
        assert failed == ["floor"]


def test_bfloat16_is_rounded_as_mlx_rounds_it():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32))
    np.testing.assert_array_equal(to_bfloat16(x), expected)
