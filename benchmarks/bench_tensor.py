"""The product by tensor operations beside the kernels that operations take on CUDA.

``python benchmarks/bench_tensor.py``: bfloat16, 4 bits, groups of 64, each beside the kernel of
tiles, whose results it must give. It is for the M5; here the bar is 1.3 times that kernel's time.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
from bench_int8 import SHAPES, seconds
from common import print_facts

from mlx_qlayers import quantized_matmul, use_backend
from mlx_qlayers.dispatch.measurements import configure
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmm import qmm
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import qmm_tensor, tensor_config
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime.spec import Spec

FMT = Format(64, 4)


def main() -> None:
    print_facts()
    with use_backend("cuda"):
        for rows in (64, 512, 2048):
            for n, k in SHAPES:
                print(row(rows, n, k), flush=True)


def row(rows: int, n: int, k: int) -> str:
    """The times of one shape."""
    x = mx.random.normal((rows, k)).astype(mx.bfloat16)
    packed = mx.quantize(mx.random.normal((n, k)).astype(mx.bfloat16) * k**-0.5, *FMT)
    mx.eval(x, packed)
    call = MatmulCall(Spec.of(x), PackedMatrix(*map(Spec.of, packed)), True, FMT)
    by_tensors = qmm_tensor(call, tensor_config(rows, k, x.dtype, FMT, True))
    by_tiles = qmm(call, configure("qmm", "cuda", rows, n, k, x.dtype, FMT, True))
    paths = {
        "tensor": partial(by_tensors, x, *packed, None),
        "qmm": partial(by_tiles, x, *packed, None),
        "taken": partial(quantized_matmul, x, *packed),
    }
    found, truth = paths["tensor"](), paths["qmm"]()
    error = (mx.abs(found - truth).max() / mx.abs(truth).max()).item()
    times = {name: seconds(run) * 1e6 for name, run in paths.items()}
    most = times["tensor"] / times["qmm"]
    text = ", ".join(f"{name} {us:.0f} us" for name, us in times.items())
    return f"{rows} x {n} x {k}: {text}; {most:.2f} times qmm; off by {error:.1e}"


if __name__ == "__main__":
    main()
