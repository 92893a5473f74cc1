"""Tensor operations on the host backend: what they compute in each layout, and planted faults."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlx_qlayers.runtime.host import (
    CompileError,
    HostKernel,
    KernelFault,
    Undefined,
    compile_source,
)
from mlx_qlayers.runtime.host.compiled_kernel import LAYOUTS

from .tensor_faults import PLANTED, Planted
from .tensor_programs import HEAD, NOT_ASKED, PRODUCT, RIGHT, K, M, N, W, X

Record = Callable[[str, Any], None]


def _wrong(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(found - truth).max() / np.abs(truth).max())


RUNNING = [p for p in PLANTED if p.kind is not CompileError]
# Valid programs are one kernel, so that it is compiled once.
_BODIES = [body for body, _ in RIGHT.values()] + [p.body for p in RUNNING]
_CASES = "".join(f"case {i}: {{ {body} }} break;\n" for i, body in enumerate(_BODIES))


def _compile(body: str, checked: bool, system: str, language: int = 400) -> HostKernel:
    return compile_source(
        *(f"{HEAD}{body}\n}}", "tensors"),
        checked=checked,
        language=language,
        defines={"__ENVIRONMENT_OS_VERSION_MIN_REQUIRED__": system},
    )


def _run(case: int, layout: str = "random", threads: int = 32, checked: bool = True) -> np.ndarray:
    kernel = _compile(f"switch (shape[3]) {{\n{_CASES}}}", checked, "260400")
    y = np.zeros((M, N), np.float32)
    buffers = {0: X, 1: W, 2: y, 3: np.array([M, N, K, case], np.int32)}
    groups = (threads, 1, 1)
    kernel.run(buffers, groups, groups, writes=[2], tensor_layout=layout)
    return y


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    case, truth = list(RIGHT).index(name), RIGHT[name][1]
    for layout in LAYOUTS:
        if layout == "apart" and name in NOT_ASKED:
            with pytest.raises(Undefined, match=f"compatible.*: ask {NOT_ASKED[name]}"):
                _run(case, layout)
            continue
        found = _run(case, layout, 64 if "two SIMD" in name else 32)
        assert _wrong(found, truth) < 2**-17, layout


def test_fast_build():
    found = _run(list(RIGHT).index("two products"), "m5", checked=False)
    assert _wrong(found, RIGHT["two products"][1]) < 2**-17


def _record(planted: Planted, found: str, record_property: Record) -> None:
    record_property("table: faults planted in tensor operations", [planted.name, found])


@pytest.mark.parametrize(
    "planted", [p for p in PLANTED if p.kind is CompileError], ids=lambda p: p.name
)
def test_refused(planted, record_property):
    with pytest.raises(CompileError, match=planted.says) as caught:
        _compile(planted.body, True, planted.system)
    found = str(caught.value).split("error: ")[1].split("\n")[0]
    _record(planted, found, record_property)


@pytest.mark.parametrize("planted", RUNNING, ids=lambda p: p.name)
def test_found(planted, record_property):
    case = len(RIGHT) + RUNNING.index(planted)
    if planted.kind is None:
        assert not _wrong(_run(case, "strips"), PRODUCT) < 0.1
        _record(planted, "the result is wrong", record_property)
        return
    with pytest.raises(planted.kind) as caught:
        _run(case, threads=planted.threads)
    assert type(caught.value) is planted.kind, str(caught.value)
    assert planted.says in str(caught.value)
    assert isinstance(caught.value, KernelFault) and caught.value.place is not None
    _record(planted, str(caught.value), record_property)


def test_before_metal_4():
    with pytest.raises(CompileError, match="mpp"):
        _compile("", True, "260200", language=320)
