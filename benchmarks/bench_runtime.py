"""The cost of the runtime: Python time of a launch.

Run ``python benchmarks/bench_runtime.py``. Without a GPU a function that does nothing stands in for
MLX's: the difference between the two columns is the runtime's own time. Times are the process's, so
that others on the machine count little.
"""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from common import Sample, Table, arguments, output

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


def main() -> None:
    """The Python time of a launch beside that of MLX's own function."""
    args = arguments(__doc__).parse_args()
    with output(args, "runtime"), somewhere() as where, tempfile.TemporaryDirectory() as folder:
        print(f"Python time of a launch in microseconds; MLX's function: {where}")
        table = Table()
        for name, call in {
            "1 input, 1 template value": exp_call(mx.zeros((32, 32))),
            "7 inputs, 6 template values": many_call(Path(folder)),
        }.items():
            bare, ours = python_time(bare_call(call)), python_time(call)
            row = {"MLX alone": bare, "runtime": ours, "more": ours.median - bare.median}
            table.add(kernel=name, **row, target=15)


def exp_call(x: mx.array) -> Call:
    """A launch as small as they come."""
    shape = {"grid": (x.size, 1, 1), "threadgroup": (256, 1, 1), "output_shapes": [x.shape]}
    return lambda: EXP([x], template={"T": mx.float32}, **shape)


def many_call(folder: Path) -> Call:
    """A launch with the arguments of a quantized matrix product."""
    (folder / "many.metal").write_text(MANY)
    inputs = ("w", "scales", "biases", "x", "bias", "k", "n")
    template = {"T": mx.float16, "BITS": 4, "GROUP": 64, "ROWS": 4, "BIAS": True, "EDGE": False}
    kernel = Kernel("many", folder / "many.metal", inputs, ("y",), template=tuple(template))
    half = mx.zeros((64, 64), mx.float16)
    arrays = [mx.zeros((64, 64), mx.uint32), *[half] * 4, mx.array(64), mx.array(64)]
    shape = {"grid": (32, 64, 8), "threadgroup": (32, 2, 1), "output_shapes": [(8, 512)]}
    return lambda: kernel(arrays, template=template, **shape)


def python_time(call: Call, calls: int = 2000, repeats: int = 15) -> Sample:
    """Microseconds until a call returns; nothing is evaluated."""
    return Sample.of(
        t / calls for t in timeit.repeat(call, timer=process_time, number=calls, repeat=repeats)
    ).scaled(1e6)


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


if __name__ == "__main__":
    main()
