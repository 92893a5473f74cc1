"""No access to memory escapes the hooks of the checked build."""

import re
from itertools import pairwise

import pytest

from mlx_qlayers.runtime.host import compiler
from mlx_qlayers.runtime.host import translate as source
from mlx_qlayers.runtime.host.access_checks import instrument

from . import mlx_kernels as mk

_TOUCHES = re.compile(
    r"= load |^\s*store |= atomicrmw |= cmpxchg |call .*@llvm\.(?:mem|masked|vector\.gather)"
)


@pytest.mark.parametrize(
    ("family", "function"),
    [
        ("gemm", "gemm<half, 32, 32, 16, 2, 2, false, true, float>"),
        ("sort", "block_sort<float, float, false, 128, 4>"),
        ("affine", "affine_quantize<half, 64, 4>"),
    ],
)
def test_every_access_is_seen(family, function):
    text = compiler.preprocess(mk.source(family), {"QK_CHECKED": "1"}, 320)
    constants = dict.fromkeys((10, 100, 110, 200, 201, 202), False)
    unit, _ = source.translate(text, function, constants)
    optimised = compiler.optimise(compiler.strict(unit, checked=True, debug=False))
    hooked = instrument(optimised, lambda line: "").ir.split("\n")
    seen = 0
    for before, line in pairwise(hooked):
        spaces = re.search(r"addrspace\([13]\)", line.split("= select")[0])
        if spaces and _TOUCHES.search(line):
            assert re.search(r"call void @qk_(load|store|atomic)\(", before), line
            seen += 1
    assert seen >= 5
