"""Kernels of Metal 4 tensor operations beside the kernels that operations take on CUDA.

``python benchmarks/bench_tensor.py``: products in bfloat16 with 4-bit matrices in groups of 64, and
causal attention with its gradients. The kernels of tiles give the results that the tensor kernels
must have; ``auto`` is ``quantized_matmul``. They are for the M5; the bar here is 1.3 times tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

import mlx.core as mx
from common import Table, add_output, measure, output, print_facts

from mlx_qlayers import backend, quantized_matmul
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.backward import attention_backward
from mlx_qlayers.metal.attention.forward import Launcher, attention_forward
from mlx_qlayers.metal.attention.tensor import attention_tensor
from mlx_qlayers.metal.quantized_matmul.qmm import qmm, qmm_config
from mlx_qlayers.metal.quantized_matmul.qmm_tensor import qmm_tensor, tensor_config
from mlx_qlayers.options import AttentionCall, MatmulCall, PackedMatrix, Scores
from mlx_qlayers.runtime.spec import Spec

FMT = Format(64, 4)
SHAPES = ((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944))
ROWS = (64, 512, 2048)
STEPS = 10

Step = Callable[[mx.array], list[mx.array]]


def traced(run: Callable[..., list[mx.array]]) -> Callable[..., list[mx.array]]:
    """A compiled function, but on the host backend, which cannot be traced."""
    return run if backend() == "host" else mx.compile(run)


def add(table: Table, task: str, x: mx.array, ways: Mapping[str, Step]) -> None:
    """Compare the results with those of tiles, and time compiled chains of each way."""
    truth = ways["tiles us"](x)
    error = max(
        (mx.abs(mine - theirs).max() / mx.abs(theirs).max()).item()
        for mine, theirs in zip(ways["tensor us"](x), truth, strict=True)
    )
    assert error < 0.03, f"{task}: off by {error}"
    inputs = [x * (1 + i / 64) for i in range(STEPS)]
    mx.eval(inputs)
    chains = {
        name: partial(traced(lambda xs, way=way: [y for x in xs for y in way(x)]), inputs)
        for name, way in ways.items()
    }
    times = {name: t.scaled(1e6 / STEPS) for name, t in measure(chains, repeats=7).items()}
    ratio = times["tensor us"].median / times["tiles us"].median
    table.add(task=task, **times, ratio=ratio, error=error)


def product(table: Table, rows: int, n: int, k: int) -> None:
    """Products with a matrix of 4 bits."""
    x = mx.random.normal((rows, k)).astype(mx.bfloat16)
    packed = mx.quantize(mx.random.normal((n, k)).astype(mx.bfloat16) * k**-0.5, *FMT)
    mx.eval(x, packed)
    call = MatmulCall(Spec.of(x), PackedMatrix(*map(Spec.of, packed)), True, FMT)
    tiles = qmm_config(backend(), rows, n, k, x.dtype, FMT, True)
    config = tensor_config(rows, k, x.dtype, FMT, True, device=backend())
    launches = {"tensor us": qmm_tensor(call, config), "tiles us": qmm(call, tiles)}
    ways: dict[str, Step] = {
        name: lambda x, launch=launch: [launch(x, *packed, None)]
        for name, launch in launches.items()
    }
    ways["auto us"] = lambda x: [quantized_matmul(x, *packed)]
    add(table, f"{rows} x {n} x {k}", x, ways)


def attention(table: Table, length: int) -> None:
    """Causal attention of 28 heads with 4 heads of keys, and the gradients of q, k and v."""
    q, k, v, d_out = (
        mx.random.normal((1, heads, length, 128)).astype(mx.bfloat16) for heads in (28, 4, 4, 28)
    )
    key = Spec.of(k)
    at = Launcher(AttentionCall(Spec.of(q), (key,), (key,), Scores(128**-0.5, True)))
    launches = {"tensor us": attention_tensor(at), "tiles us": attention_forward(at)}
    outputs = launches["tiles us"](q, k, v, None, None)
    mx.eval(d_out, outputs)
    forward: dict[str, Step] = {
        name: lambda q, run=run: run(q, k, v, None, None)[:1] for name, run in launches.items()
    }
    backward: dict[str, Step] = {}
    for name in launches:
        run = attention_backward(at, name == "tensor us")[0]
        backward[name] = lambda d, run=run: run([q, k, v, None, None], [d, None], outputs)[:3]
    add(table, f"attention {length}", q, forward)
    add(table, f"gradients {length}", d_out, backward)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    times = dict.fromkeys(("tensor us", "tiles us", "auto us"), 14)
    table = Table({"task": 20} | times | {"ratio": 6, "error": 8})
    table.print_header()
    with output(args, "tensor"):
        for rows in ROWS:
            for n, k in SHAPES:
                product(table, rows, n, k)
        for length in ROWS[1:]:
            attention(table, length)


if __name__ == "__main__":
    main()
