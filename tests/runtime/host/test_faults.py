"""Faults planted on purpose, in kernels that a GPU would run: each one is caught, and named.

The summary of the test run prints the table.
"""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from mlx_qlayers.runtime import host

_BEFORE = """
#include <metal_stdlib>
using namespace metal;
kernel void faulty(
    const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
    device atomic_uint* counter [[buffer(2)]], constant int& n [[buffer(3)]],
    constant int& which [[buffer(4)]], uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint group [[threadgroup_position_in_grid]]) {
"""


@dataclass(frozen=True)
class Planted:
    """A kernel body with one fault in it, and how it is found."""

    name: str  # what is wrong
    body: str  # the body; `x` has 64 floats, `y` 64, `n` is 64
    kind: type[host.KernelFault]  # the exception
    says: str  # what its message contains
    threads: tuple[int, int] = (64, 64)  # of the grid and of one threadgroup
    fresh: bool = False  # whether `y` is an output that must be written
    budget: int = 100_000


_SHARED = "threadgroup float s[64]; "
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "

PLANTED = (
    Planted("read past the end", "y[i] = x[i + 1];", host.OutOfBounds,
     "at byte 256 of buffer 0 (x)"),
    Planted(
     "read before the start", "y[i] = x[int(i) - 1];", host.OutOfBounds, "at byte -4 of buffer 0"),
    Planted("write past the end", "y[2 * i] = 1;", host.OutOfBounds, "writes 4 bytes at byte 256"),
    Planted(
     "write before the start", "y[int(i) - 3] = 1;", host.OutOfBounds, "at byte -12 of buffer 1"),
    Planted("read of the padding behind a buffer", "y[i] = ((const device half*)x)[128 + i % 4];",
     host.OutOfBounds, "reads 2 bytes at byte 256"),
    Planted("vector read across the end", "y[i] = ((const device packed_float3*)x)[21][i % 3];",
     host.OutOfBounds, "of buffer 0"),
    Planted("32-bit index overflow", "y[i] = x[int(65536u * 32768u * (i % 2))];", host.OutOfBounds,
     "buffer 0"),
    Planted("write to an input", "((device float*)&x[i])[0] = 1;", host.OutOfBounds, "read-only"),
    Planted("pointer to nowhere", "y[i] = *(const device float*)(ulong)(16 + n);", host.OutOfBounds,
     "no buffer"),
    Planted("index outside a threadgroup array", _SHARED + "s[t + n] = x[i]; y[i] = 0;",
     host.OutOfBounds, "index 64 is outside an array"),
    Planted("threadgroup array overrun",
     _SHARED + "threadgroup float* p = s; p[t + 1] = x[i]; y[i] = 0;", host.OutOfBounds,
     "at byte 256 of threadgroup array s, which has 256"),
    Planted("threadgroup array overrun into its neighbour",
     _SHARED + "threadgroup float u[64]; u[t] = 0; threadgroup float* p = s; p[t + 8] = u[t];"
     "y[i] = 0;", host.OutOfBounds, "threadgroup array s"),
    Planted("thread array overrun",
     "float a[4] = {0, 0, 0, 0}; a[(i + n) % 5] = 1; y[i] = a[(i + n) % 4];", host.OutOfBounds,
     "index 4 is outside an array"),
    Planted("uninitialised threadgroup memory",
     _SHARED + "if (t > 0) s[t] = 1; " + _BARRIER + "y[i] = s[0];", host.Uninitialised,
     "byte 0 of threadgroup array s"),
    Planted("output partly unwritten", "if (i != 41) y[i] = 1;", host.Uninitialised, "first at 164",
     fresh=True),
    Planted(
     "output read before it is written", "y[i] += x[i];", host.Uninitialised, "(y)", fresh=True),
    Planted("threadgroup race: no barrier after the write",
     _SHARED + "s[t] = 0; " + _BARRIER + "s[t] = x[i]; y[i] = s[63 - t];", host.Race,
     "threadgroup array s"),
    Planted("threadgroup race: no barrier before the next write",
     _SHARED + f"for (int k = 0; k < 2; k++) {{ s[t] = k; {_BARRIER} y[i] = s[63 - t]; }}",
     host.Race, "threadgroup array s"),
    Planted("barrier without memory flags",
     _SHARED + "s[t] = x[i] + 1; threadgroup_barrier(mem_flags::mem_none); y[i] = s[63 - t];",
     host.Race, "threadgroup array s"),
    Planted("barrier with the flags of the other memory",
     "y[i] = t; " + _BARRIER + "y[63 - t] += 1;", host.Race, "buffer 1 (y)"),
    Planted("SIMD barrier where the threadgroup's is needed", _SHARED + "s[t] = 0; " + _BARRIER
     + "s[t] = t; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[63 - t];", host.Race,
     "threadgroup array s"),
    Planted("write race in a SIMD group", _SHARED + "s[t / 2] = t; y[i] = 0;", host.Race,
     "threadgroup array s"),
    Planted("device race: threadgroups write one element", "y[t] = i;", host.Race, "buffer 1 (y)",
     (64, 32)),
    Planted("device race: sum without atomics", "y[0] += x[i];", host.Race, "buffer 1 (y)", (64,
     32)),
    Planted("device race: reads what another threadgroup writes",
     "y[i] = 1; if (group == 1) x = y, y[i] += x[0];", host.Race, "buffer 1 (y)", (64, 32)),
    Planted("device race: writes what another threadgroup read, behind a barrier",
     "float v = y[63]; threadgroup_barrier(mem_flags::mem_device); if (i < 63) y[i] = v;"
     "if (i == 32) y[63] = 2;", host.Race, "buffer 1 (y)", (64, 32)),
    Planted("device race: barrier across threadgroups",
     "y[i] = t; threadgroup_barrier(mem_flags::mem_device); y[63 - i] += 1;", host.Race,
     "buffer 1 (y)", (64, 32)),
    Planted("atomic and plain access mixed",
     "atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);"
     "if (i == 9) ((device uint*)counter)[0] = 5;", host.Race, "buffer 2 (counter)"),
    Planted("barrier in a divergent branch", f"if (t < 16) {{ {_BARRIER} }} y[i] = 0; {_BARRIER}",
     host.Divergence, "different threadgroup barriers"),
    Planted("barrier in one SIMD group only",
     f"if (t < 32) {{ {_BARRIER} }} else y[i] = simd_sum(1.0f);{_BARRIER}", host.Divergence,
     "different threadgroup barriers"),
    Planted("barrier in a loop of different lengths",
     f"for (uint k = 0; k <= t / 32; k++) {{ {_BARRIER} }} {_BARRIER} y[i] = 0;", host.Divergence,
     "barrier"),
    Planted("SIMD function in a divergent branch",
     "float v = 0; if (lane < 16) v = simd_sum(x[i]); y[i] = v + simd_max(v);", host.Divergence,
     "meet at different places"),
    Planted("two SIMD functions in two branches",
     "y[i] = lane % 2 ? simd_sum(x[i]) : simd_max(x[i]);", host.Divergence,
     "meet at different places"),
    Planted("SIMD function against a barrier",
     f"if (lane == 0) {{ {_BARRIER} }} else {{ y[i] = simd_sum(x[i]); }}", host.Divergence,
     "not all live threads reach"),
    Planted("shuffle from a lane that is not there", "y[i] = simd_shuffle(x[i], ushort(31));",
     host.Divergence, "reads lane 31", (20, 20)),
    Planted("misaligned vector load", "y[i] = ((const device float4*)(x + 1))[0].x;",
     host.Misaligned, "multiple of 16"),
    Planted("threadgroup array read wider than it is declared",
     "threadgroup half tile[64]; tile[i % 64] = half(x[i]); "
     "threadgroup_barrier(mem_flags::mem_threadgroup); "
     "y[i] = float((*(const threadgroup uint4*)(tile + 8 * (i % 8))).x);", host.Misaligned,
     "multiple of 16"),
    Planted("misaligned word load", "y[i] = *(const device uint*)((const device char*)x + 2);",
     host.Misaligned, "multiple of 4"),
    Planted("too much threadgroup memory",
     "threadgroup float a[8192]; threadgroup float b[16]; a[t] = 0; b[0] = 1; y[i] = a[t];",
     host.ThreadgroupMemory, "32832 bytes", (1, 1)),
    Planted(
     "endless loop", "uint k = n; while (k % 2 == 0) { k += 2; } y[i] = k;", host.Hang, "steps"),
    Planted("wait for another threadgroup",
     "if (i == 0) { while (atomic_load_explicit(counter, memory_order_relaxed) == 0) {} }"
     "else atomic_store_explicit(counter, 1u, memory_order_relaxed);", host.Hang, "steps"),
    Planted(
     "division by zero", "y[i] = 7 / (int(i) * (n - 64));", host.Undefined, "division by zero"),
)  # fmt: skip


# Those without memory of a threadgroup, which would share it, are one kernel: it is compiled once.
TOGETHER = [p for p in PLANTED if not re.search("threadgroup (float|half)", p.body)]
_CASES = "".join(f"case {i}: {{ {each.body} }} break;\n" for i, each in enumerate(TOGETHER))


def run(planted: Planted) -> None:
    body, case = planted.body, 0
    if planted in TOGETHER:
        body, case = f"switch (which) {{\n{_CASES}}}", TOGETHER.index(planted)
    kernel = host.compile_source(f"{_BEFORE}{body}\n}}", "faulty", checked=True)
    numbers, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    buffers = {0: numbers, 1: y, 2: np.zeros(1, np.uint32), 3: np.int32(64), 4: np.int32(case)}
    grid, group = planted.threads
    options = {"fresh": [1] if planted.fresh else [], "budget": planted.budget}
    kernel.run(buffers, (grid, 1, 1), (group, 1, 1), writes=[1, 2], **options)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_planted_fault(planted, record_property):
    with pytest.raises(host.KernelFault) as caught:
        run(planted)
    found, message = caught.value, str(caught.value)
    assert type(found) is planted.kind, message
    assert planted.says in message
    assert "faulty" in message
    if "never written" not in message:
        assert re.search(r"kernel faulty, threadgroup \(\d, 0, 0\), thread \(\d+, 0, 0\)", message)
        assert found.place is not None and re.match(r"source\.metal:\d+$", found.place.line)
    record_property(
        "table: faults planted in kernels", [planted.name, planted.kind.__name__, message]
    )


def test_dynamic_threadgroup_memory():
    text = """#include <metal_stdlib>
    kernel void f(device float* y [[buffer(0)]], threadgroup float* s [[threadgroup(0)]],
                  uint i [[thread_position_in_grid]]) { s[i] = 1; y[i] = s[i]; }"""
    kernel = host.compile_source(text, "f", checked=True)
    y = np.zeros(8, np.float32)
    kernel.run({0: y}, (8, 1, 1), (8, 1, 1), writes=[0], threadgroup_bytes=[32])
    assert y.sum() == 8
    with pytest.raises(host.ThreadgroupMemory, match="32784 bytes"):
        kernel.run({0: y}, (8, 1, 1), (8, 1, 1), writes=[0], threadgroup_bytes=[32784])
    with pytest.raises(host.OutOfBounds, match="threadgroup array"):
        kernel.run({0: y}, (8, 1, 1), (8, 1, 1), writes=[0], threadgroup_bytes=[16])


def test_what_is_allowed():
    """Code that looks like a fault and is none: early returns, equal writes, atomics."""
    body = """
    if (i >= 50) return;
    threadgroup float s[64];
    s[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[49 - t] + simd_max(0.0f);
    y[63] = 5;
    atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
    """
    kernel = host.compile_source(_BEFORE + body + "}", "faulty", checked=True)
    y, counter = np.zeros(64, np.float32), np.zeros(1, np.uint32)
    x = np.arange(64, dtype=np.float32)
    counters = kernel.run(
        {0: x, 1: y, 2: counter, 3: np.int32(64), 4: np.int32(0)},
        (64, 1, 1),
        (64, 1, 1),
        writes=[1, 2],
    )
    assert counter[0] == 50 and y[63] == 5 and np.array_equal(y[:50], x[49::-1])
    assert counters is not None and counters.same_value_writes == 49


def test_threads_of_a_threadgroup():
    kernel = host.compile_source(_BEFORE + "y[i] = 0;}", "faulty", checked=True)
    with pytest.raises(host.HostError, match="1025 threads"):
        kernel.raw((1, 1, 1), (1025, 1, 1))
