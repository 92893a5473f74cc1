"""The headers in front of a kernel are parsed once, and change nothing about what is behind."""

from pathlib import Path

from mlx_qlayers.runtime.host import CompileError, cache, compile_source, compiler

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


def test_a_frame_too_large_for_its_stack_is_compiled_anew(folder, monkeypatch):
    levels, make = [], compiler._object

    def refuse_first(text: str, folder: Path, *flags: str) -> None:
        levels.append(flags[0])
        if len(levels) == 1:
            raise CompileError("error: stack frame size (200000) exceeds limit (131072)")
        make(text, folder, *flags)

    monkeypatch.setattr(compiler, "_object", refuse_first)
    compile_source(HEADERS + KERNEL, "f", checked=True, defines={"VALUE": "3"})
    assert levels == ["-O0", "-O1"] and cache.root().is_relative_to(folder)
