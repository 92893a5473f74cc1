"""What the runtime costs: Python time of a launch, bytes of each source, speed of the host backend.

Run ``python benchmarks/bench_runtime.py``. MLX hashes a kernel's whole source at every launch, and
a decoding step is hundreds of launches, so both are kept small. Without a GPU a function that does
nothing stands in for MLX's: the difference between the two columns is the runtime's own time.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import pkgutil
import tempfile
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from common import Sample, Table, add_output, measure, print_facts, write_output

import mlx_qlayers.metal
from mlx_qlayers.runtime.backend import backend, use_backend
from mlx_qlayers.runtime.kernel import Kernel

Call = Callable[[], Any]

EXP = Kernel("exp_forward", "exp/exp.metal", ("x",), ("y",), template=("T",))
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
# What MLX's own quantized.metal includes.
MLX_SOURCE = "".join(
    f'#include "mlx/backend/metal/kernels/{name}.h"\n'
    for name in ("utils", "steel/gemm/gemm", "quantized_utils", "quantized")
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    tables = [launches(), sources()]
    if find_spec("ziglang") is not None:
        tables += [host_launches(), host_product()]
    write_output(args, "runtime", tables)


def launches() -> Table:
    """The Python time of a launch beside that of MLX's own function."""
    with somewhere() as where, tempfile.TemporaryDirectory() as folder:
        print(f"Python time of a launch in microseconds; MLX's function: {where}")
        table = Table({"kernel": 30, "MLX alone": 14, "runtime": 14, "more": 8, "target": 8})
        table.print_header()
        for name, call in {
            "1 input, 1 template value": exp_call(mx.zeros((32, 32))),
            "7 inputs, 6 template values": many_call(Path(folder)),
        }.items():
            bare, ours = python_time(bare_call(call)), python_time(call)
            more = ours.median - bare.median
            table.add(
                **{"kernel": name, "MLX alone": bare, "runtime": ours, "more": more}, target=15
            )
    return table


def sources() -> Table:
    """How much of each kernel's file is sent."""
    print("\nSource in bytes")
    table = Table({"kernel": 30, "header": 14, "body": 14, "total": 8})
    table.print_header()
    for name, kernel in kernels().items():
        header, body = len(kernel.program.header), len(kernel.program.source)
        table.add(kernel=name, header=header, body=body, total=header + body)
    return table


def host_launches() -> Table:
    """What a launch on the host costs besides its threads' work."""
    print("\nA launch on the host in microseconds")
    table = Table({"kernel": 30, "time": 14, "target": 8})
    table.print_header()
    x = mx.zeros(8)
    mx.eval(x)
    with use_backend("host"):
        table.add(kernel="exp of 8 elements", time=python_time(exp_call(x), 500), target=50)
    return table


def host_product(n: int = 3584) -> Table:
    """MLX's own matrix-vector kernel on both builds beside its CPU operator, once it is right."""
    from mlx_qlayers.runtime.host import compile_source

    print(f"\n(1, {n}) times ({n}, {n}), float16, 4 bits, groups of 64, in milliseconds")
    weight, x = (mx.random.normal(shape).astype(mx.float16) for shape in ((n, n), (1, n)))
    w, scales, biases = mx.quantize(weight, group_size=64, bits=4)
    y = mx.zeros((1, n), mx.float16)
    truth = x.astype(mx.float32) @ mx.dequantize(w, scales, biases, 64, 4).astype(mx.float32).T
    mx.eval(w, scales, biases, x, y, truth)
    size, none, stride = (ctypes.c_int * 1)(n), (ctypes.c_int * 1)(0), (ctypes.c_int64 * 1)(0)
    # The kernel's buffers, in its order; what only batches use is zero.
    arrays = [w, scales, biases, x, y, size, size, none, none, stride, none, none, *[stride] * 3]
    contenders: dict[str, Call] = {
        "mx.quantized_matmul": lambda: mx.quantized_matmul(x, w, scales, biases)
    }
    for name, checked in (("qmv_fast, fast build", False), ("qmv_fast, checked build", True)):
        kernel = compile_source(MLX_SOURCE, "affine_qmv_fast<half, 64, 4, false>", checked=checked)
        grid, threadgroup = (32, n // 4, 1), (32, 2, 1)
        run = partial(kernel.run, dict(enumerate(arrays)), grid, threadgroup, writes=[4])
        run()
        error = (mx.abs(y - truth).max() / mx.abs(truth).max()).item()
        assert error < 2e-3, f"{name} is wrong, relative error {error}"
        contenders[name] = run
    table = Table({"kernel": 30, "time": 14, "target": 8})
    table.print_header()
    targets = {"qmv_fast, fast build": 8, "qmv_fast, checked build": 5000}
    for name, time in measure(contenders, repeats=5).items():
        table.add(kernel=name, time=time.scaled(1e3), target=targets.get(name, ""))
    return table


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


def python_time(call: Call, calls: int = 2000, repeats: int = 15) -> Sample:
    """Microseconds until a call returns; nothing is evaluated."""
    return Sample.of(t / calls for t in timeit.repeat(call, number=calls, repeat=repeats)).scaled(
        1e6
    )


@contextmanager
def somewhere() -> Iterator[str]:
    """The backend of this machine's GPU, or metal with a function that does nothing."""
    if (found := backend()) in ("metal", "cuda"):
        yield f"mx.fast.{found}_kernel"
        return
    with (
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(mx.fast, "metal_kernel", lambda **made: _nothing),
        use_backend("metal"),
    ):
        yield "a stand-in that does nothing"


def _nothing(**call: Any) -> list[mx.array]:
    return []


def bare_call(call: Call) -> Call:
    """The call of MLX's own function that a call ends in, without the runtime."""
    name = f"{backend()}_kernel"
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
    found = []
    for module in pkgutil.walk_packages(mlx_qlayers.metal.__path__, "mlx_qlayers.metal."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Kernel):
                found.append(value)
            elif getattr(value, "__annotations__", {}).get("return") == "Kernel":
                found += declared(value)
    return {kernel.name: kernel for kernel in sorted(found, key=lambda kernel: kernel.name)}


# Of a function that declares a kernel with the inputs that a call has: the fewest, and the most.
ENDS = {"bool": (False, True), "int": (1, 3), "tuple[str, ...]": ((), ())}


def declared(declare: Callable[..., Kernel]) -> list[Kernel]:
    """What such a function declares for both ends of each of its parameters."""
    kinds = [kind for name, kind in declare.__annotations__.items() if name != "return"]
    return [declare(*values) for values in product(*(dict.fromkeys(ENDS[k]) for k in kinds))]


if __name__ == "__main__":
    main()
