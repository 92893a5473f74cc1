"""No access to memory escapes the hooks of the checked build."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from mlx_qlayers.runtime.host import compiler, llvm_ir, toolchain
from mlx_qlayers.runtime.host import translate as source
from mlx_qlayers.runtime.host.access_checks import instrument, size_of

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
def test_every_access_is_seen(family: str, function: str) -> None:
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


@pytest.mark.parametrize(
    ("kind", "bytes_"),
    [("i1", 1), ("half", 2), ("i24", 3), ("<4 x float>", 16), ("[3 x i16]", 6), ("ptr", 8)],
)
def test_size_of(kind: str, bytes_: int) -> None:
    assert size_of(kind) == bytes_


def test_sizes_that_are_not_known_stop_the_build() -> None:
    with pytest.raises(ValueError, match="x86_fp80"):
        size_of("x86_fp80")


def test_locations_come_from_the_caller_of_the_library() -> None:
    text = """
    !1 = !DILocation(line: 9, scope: !2, inlinedAt: !4)
    !2 = distinct !DISubprogram(name: "simd_sum", scope: !3, file: !3)
    !3 = !DIFile(filename: "metal_simdgroup", directory: "/shims")
    !4 = !DILocation(line: 3, scope: !5)
    !5 = distinct !DISubprogram(name: "k", file: !6)
    !6 = !DIFile(filename: "source.metal", directory: "/")
    """.replace("    !", "!")
    assert llvm_ir.Locations(text, "/shims").of("call void @f(), !dbg !1") == "source.metal:3"
    assert toolchain.SHIMS.name == "host"
