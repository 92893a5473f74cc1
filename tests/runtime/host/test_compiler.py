"""The headers in front of a kernel are parsed once, and change nothing about what is behind."""

from pathlib import Path

from mlx_qlayers.runtime.host import compile_source

HEADERS = "#include <metal_stdlib>\n#include <metal_atomic>\nusing namespace metal;\n"
KERNEL = "kernel void f(device float* y, uint i [[thread_position_in_grid]]) { y[i] = VALUE; }\n"


def headers(folder: Path) -> list[Path]:
    return list(folder.rglob("headers.pch"))


def test_kernels_behind_the_same_headers_share_them(folder):
    for value in ("1", "2"):
        y = bytearray(16)
        text = HEADERS + KERNEL.replace("VALUE", value)
        kernel = compile_source(text, "f", checked=True)
        kernel.run({0: y}, (4, 1, 1), (4, 1, 1), writes=[0])
        assert memoryview(y).cast("f").tolist() == [float(value)] * 4
    assert len(headers(folder)) == 1
    compile_source(text, "f", checked=False)
    compile_source('#include "mlx/backend/metal/kernels/utils.h"\n' + text, "f", checked=True)
    assert len(headers(folder)) == 3


def test_a_frame_too_large_for_its_stack_is_compiled_anew():
    """With room for each of its steps apart, as without optimizing, it has none."""
    step = "for (uint j = 0; j < 1024; j++) s[j] = j; y[i] = s[uint(y[i]) + 1];"
    steps = "".join(f"{{ float s[1024]; {step} }}" for _ in range(64))
    y, size = bytearray(16), (4, 1, 1)
    kernel = compile_source(HEADERS + KERNEL.replace("y[i] = VALUE;", steps), "f", checked=True)
    kernel.run({0: y}, size, size, writes=[0])
    assert memoryview(y).cast("f").tolist() == [64.0] * 4
