"""What the runtime costs: Python time of a launch, bytes of each source, speed of the host backend.

Run ``python benchmarks/bench_runtime.py``. MLX hashes a kernel's whole source at every launch, and
a decoding step is hundreds of launches, so both are kept small. Without a GPU a function that does
nothing stands in for MLX's: the difference between the two columns is the runtime's own time.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import platform
import statistics
import tempfile
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

import mlx_qlayers.metal
from mlx_qlayers.runtime.backend import backend, use_backend
from mlx_qlayers.runtime.kernel import Kernel

Call = Callable[[], Any]

TARGET = 15.0
EXP = Kernel("exp_forward", "exp.metal", ("x",), ("y",), template=("T",))
# What MLX's own quantized.metal includes.
MLX_SOURCE = "".join(
    f'#include "mlx/backend/metal/kernels/{name}.h"\n'
    for name in ("utils", "steel/gemm/gemm", "quantized_utils", "quantized")
)
# As many inputs and template values as the largest kernels have.
MANY = """
template <typename T, int BITS, int GROUP, int ROWS, bool BIAS, bool EDGE>
[[kernel]] void many(
    const device uint32_t* w, const device T* scales, const device T* biases, const device T* x,
    const device T* bias, constant int& k, constant int& n, device T* y,
    uint i [[thread_position_in_grid]]) {
  y[i] = scales[0] + biases[0] + x[0] + bias[0] + T(w[0] + k + n + BITS + GROUP + ROWS);
}
"""


def main() -> None:
    """Print the three tables."""
    print(f"mlx {version('mlx')}, Python {platform.python_version()}, {platform.platform()}")
    print_launches()
    print_sources()
    if find_spec("ziglang") is not None:
        print_host()


def print_launches() -> None:
    """The Python time of a launch beside that of MLX's own function."""
    with somewhere() as where, tempfile.TemporaryDirectory() as folder:
        print(f"backend: {where}\n\nPython time of a launch, us (median, quartile distance)")
        print(f"{'':<32}{'bare MLX':>16}{'with the runtime':>20}{'more':>10}{'target':>10}")
        for name, call in {
            "1 input, 1 template value": exp_call(mx.zeros((32, 32))),
            "7 inputs, 6 template values": many_call(Path(folder)),
        }.items():
            bare, ours = measure(bare_call(call)), measure(call)
            more = ours[0] - bare[0]
            print(f"{name:<32}{text(bare):>16}{text(ours):>20}{more:>10.2f}{TARGET:>10.0f}")


def print_sources() -> None:
    """How much of each kernel's file is sent."""
    print(f"\nSource, bytes\n{'':<32}{'header':>16}{'body':>20}{'total':>10}")
    for name, kernel in kernels().items():
        header, body = len(kernel.program.header), len(kernel.program.source)
        print(f"{name:<32}{header:>16}{body:>20}{header + body:>10}")


def print_host() -> None:
    """The overhead of a launch on the host, and MLX's own matrix-vector kernel there."""
    print(f"\nHost backend, {os.cpu_count()} cores (median, quartile distance)")
    with use_backend("host"):
        x = mx.zeros(8)
        mx.eval(x)
        overhead = measure(exp_call(x), 500)
    print(f"{'a launch of 8 threads, us':<32}{text(overhead):>16}{'target':>20}{50:>10}")
    mlx, fast, checked = matrix_vector()
    print("product of (1, 3584) and (3584, 3584), 4 bits, groups of 64, float16, ms")
    print(f"{'mx.quantized_matmul':<32}{text(mlx):>16}")
    print(f"{'MLX qmv_fast, fast build':<32}{text(fast):>16}{'target':>20}{8:>10}")
    print(f"{'MLX qmv_fast, checked build':<32}{text(checked):>16}{'target':>20}{5000:>10}")


def matrix_vector(n: int = 3584) -> list[tuple[float, float]]:
    """Milliseconds of the CPU operator, and of MLX's Metal kernel on both builds, once right."""
    from mlx_qlayers.runtime.host import compile_source

    weight, x = mx.random.normal((n, n)).astype(mx.float16), mx.random.normal((1, n))
    x = x.astype(mx.float16)
    w, scales, biases = mx.quantize(weight, group_size=64, bits=4)
    y = mx.zeros((1, n), mx.float16)
    truth = x.astype(mx.float32) @ mx.dequantize(w, scales, biases, 64, 4).astype(mx.float32).T
    mx.eval(w, scales, biases, x, y, truth)
    size, none, stride = (ctypes.c_int * 1)(n), (ctypes.c_int * 1)(0), (ctypes.c_int64 * 1)(0)
    # The kernel's buffers, in its order; what only batches use is zero.
    arrays = [w, scales, biases, x, y, size, size, none, none, stride, none, none, *[stride] * 3]
    buffers = dict(enumerate(arrays))

    def stock() -> None:
        mx.eval(mx.quantized_matmul(x, w, scales, biases, group_size=64, bits=4))

    times = [measure(stock, 1, 5)]
    for checked in (False, True):
        kernel = compile_source(MLX_SOURCE, "affine_qmv_fast<half, 64, 4, false>", checked=checked)
        run = partial(kernel.run, buffers, (32, n // 4, 1), (32, 2, 1), writes=[4])
        run()
        error = (mx.abs(y - truth).max() / mx.abs(truth).max()).item()
        assert error < 2e-3, f"wrong result, relative error {error}"
        times.append(measure(run, 1, 5 if checked else 50))
    return [(median / 1e3, spread / 1e3) for median, spread in times]


def exp_call(x: mx.array) -> Call:
    """A launch as small as they come."""
    return lambda: EXP(
        [x],
        template={"T": mx.float32},
        grid=(x.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
    )


def many_call(folder: Path) -> Call:
    """A launch with the arguments of a quantized matrix product."""
    (folder / "many.metal").write_text(MANY)
    inputs = ("w", "scales", "biases", "x", "bias", "k", "n")
    template = {"T": mx.float16, "BITS": 4, "GROUP": 64, "ROWS": 4, "BIAS": True, "EDGE": False}
    kernel = Kernel("many", folder / "many.metal", inputs, ("y",), template=tuple(template))
    half = mx.zeros((64, 64), mx.float16)
    arrays = [mx.zeros((64, 64), mx.uint32), *[half] * 4, mx.array(64), mx.array(64)]
    return lambda: kernel(
        arrays,
        template=template,
        grid=(32, 64, 8),
        threadgroup=(32, 2, 1),
        output_shapes=[(8, 512)],
    )


def measure(call: Call, calls: int = 2000, repeats: int = 15) -> tuple[float, float]:
    """Microseconds of a call: the median, and the distance of the quartiles."""
    times = [t / calls * 1e6 for t in timeit.repeat(call, number=calls, repeat=repeats)]
    low, median, high = statistics.quantiles(times, n=4)
    return median, high - low


def text(measured: tuple[float, float]) -> str:
    return f"{measured[0]:.2f} ({measured[1]:.2f})"


@contextmanager
def somewhere() -> Iterator[str]:
    """The backend of this machine's GPU, or metal with a function that does nothing."""
    if (found := backend()) in ("metal", "cuda"):
        yield f"{found}, {mx.device_info()}"
        return
    with (
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(mx.fast, "metal_kernel", lambda **made: _nothing),
        use_backend("metal"),
    ):
        yield f"none; a function that does nothing stands in, {platform.machine()}"


def _nothing(**call: Any) -> list[mx.array]:
    return []


def bare_call(call: Call) -> Call:
    """The call of MLX's own function that a call ends in, without the runtime."""
    name = "cuda_kernel" if backend() == "cuda" else "metal_kernel"
    real, seen = getattr(mx.fast, name), []

    def make(**made: Any) -> Callable[..., list[mx.array]]:
        kernel = real(**made)

        def launch(**arguments: Any) -> list[mx.array]:
            seen.append(lambda: kernel(**arguments))
            return kernel(**arguments)

        return launch

    with patch.object(mx.fast, name, make):
        call()
    return seen[0]


def kernels() -> dict[str, Kernel]:
    """Every kernel declared in a module of ``mlx_qlayers.metal``, by name."""
    found = {}
    for module in pkgutil.iter_modules(mlx_qlayers.metal.__path__, "mlx_qlayers.metal."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Kernel):
                found[value.name] = value
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
