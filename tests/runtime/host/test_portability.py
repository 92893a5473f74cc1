"""The runtime and a kernel compile for the platforms that this machine is not."""

from pathlib import Path

import pytest
from kernel_assembly import compiling_for

from mlx_qlayers.runtime.host import cache, compiler, runtime_library, toolchain
from mlx_qlayers.runtime.host import translate as source

KERNEL = """
#include <metal_stdlib>
using namespace metal;
kernel void k(const device half* x [[buffer(0)]], device bfloat* y [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  threadgroup float s[32];
  s[i % 32] = simd_sum(float(x[i])) + precise::exp(float(x[i]));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = bfloat(s[31 - i % 32]);
}
"""


@pytest.mark.parametrize(
    ("target", "clang_cpu", "zig_cpu"),
    [
        ("aarch64-macos", "-mcpu=apple-m1", "-mcpu=apple_m1"),
        ("aarch64-linux-gnu", "-mcpu=cortex-a76", "-mcpu=cortex_a76"),
        ("x86_64-macos", "-march=haswell", "-march=haswell"),
        ("x86_64-linux-gnu", "-march=x86-64", "-march=x86_64"),
    ],
)
def test_another_platform(target, clang_cpu, zig_cpu):
    def make(folder: Path) -> None:
        with compiling_for(target, clang_cpu):
            text = compiler.preprocess(KERNEL, {}, 320)
            unit, _ = source.translate(text, "k", {})
            for checked, build in ((False, compiler.object_fast), (True, compiler.object_checked)):
                build(compiler.strict(unit, checked=checked, debug=checked), folder)
                (folder / "kernel.o").rename(folder / f"{checked}.o")
        with compiling_for(target, zig_cpu):
            runtime_library.objects(folder)

    # In the cache as other kernels: compiled anew where the compiler or the runtime has changed.
    key = toolchain.key("another platform", target, clang_cpu, zig_cpu, KERNEL)
    objects = [*cache.entry(key, make).glob("*.o")]
    magic = b"\xcf\xfa\xed\xfe" if "macos" in target else b"\x7fELF"
    assert len(objects) > 2 and all(path.read_bytes()[:4] == magic for path in objects)
