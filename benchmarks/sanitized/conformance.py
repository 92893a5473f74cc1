"""The conformance set: what kernels may call, each against NumPy."""

from __future__ import annotations

from functools import partial

from runtime import conformance

from mlx_qlayers.runtime.backend import backend

from . import Cases


def cases() -> Cases:
    for case in conformance.cases():
        yield case.name, partial(run, case)


def run(case: conformance.Case) -> None:
    wrong = [str(part) for part in case.compare(case.run(backend())) if not part.passed]
    assert not wrong, "; ".join(wrong)
