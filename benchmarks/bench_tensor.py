"""Kernels of Metal 4 tensor operations beside the kernels that operations take on CUDA.

``python benchmarks/bench_tensor.py``: products in bfloat16 with 4-bit matrices in groups of 64, and
causal attention with its gradients. The kernels of tiles give the results that the tensor kernels
must have; ``auto`` is ``quantized_matmul``. They are for the M5; the bar here is 1.3 times tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
from common import arguments, output
from harness import Run, case, chain
from quantized_products import Case

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

Way = Callable[[mx.array], list[mx.array]]


class Product(NamedTuple):
    """Rows times a matrix of 4 bits."""

    rows: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.n} x {self.k}"

    def ways(self) -> tuple[mx.array, dict[str, Way]]:
        """The first rows, and the kernels."""
        shape = Case((self.n, self.k), self.rows)
        x, packed = shape.x(), shape.copies()[0]
        call = MatmulCall(Spec.of(x), PackedMatrix(*map(Spec.of, packed)), True, FMT)
        tiles = qmm(call, qmm_config(backend(), *self, x.dtype, FMT, True))
        config = tensor_config(self.rows, self.k, x.dtype, FMT, True, device=backend())
        tensor = qmm_tensor(call, config)
        return x, {
            "tiles us": lambda x: [tiles(x, *packed, None)],
            "auto us": lambda x: [quantized_matmul(x, *packed)],
            "tensor us": lambda x: [tensor(x, *packed, None)],
        }


class Attention(NamedTuple):
    """Causal attention of 28 heads with 4 heads of keys, or the gradients of q, k and v."""

    task: str
    length: int

    def __str__(self) -> str:
        return f"{self.task} {self.length}"

    def ways(self) -> tuple[mx.array, dict[str, Way]]:
        """The queries or the cotangent, and the kernels."""
        q, k, v, d_out = (
            mx.random.normal((1, heads, self.length, 128)).astype(mx.bfloat16)
            for heads in (28, 4, 4, 28)
        )
        key = Spec.of(k)
        at = Launcher(AttentionCall(Spec.of(q), (key,), (key,), Scores(128**-0.5, True)))
        tiles, tensor = attention_forward(at), attention_tensor(at)
        outputs = tiles(q, k, v, None, None)
        mx.eval(d_out, outputs)
        if self.task == "attention":
            return q, {
                "tiles us": lambda q: tiles(q, k, v, None, None)[:1],
                "tensor us": lambda q: tensor(q, k, v, None, None)[:1],
            }
        back = {
            name: attention_backward(at, name == "tensor us")[0]
            for name in ("tiles us", "tensor us")
        }
        return d_out, {
            name: lambda d, run=run: run([q, k, v, None, None], [d, None], outputs)[:3]
            for name, run in back.items()
        }


@lru_cache(1)
def chains(shape: Product | Attention) -> dict[str, Run]:
    """Compiled chains of each way."""
    x, ways = shape.ways()
    inputs = [x * (1 + i / 64) for i in range(STEPS)]
    mx.eval(inputs)
    return {
        name: chain(lambda _, each, way=way: way(each), x, inputs) for name, way in ways.items()
    }


def main() -> None:
    args = arguments(__doc__, repeats=7).parse_args()
    shapes: list[Product | Attention] = [Product(m, *shape) for m in ROWS for shape in SHAPES]
    shapes += [Attention(task, n) for n in ROWS[1:] for task in ("attention", "gradients")]

    def more(shape: Any, found: Any) -> dict[str, float]:
        return {"ratio": found["tensor us"].median / found["tiles us"].median}

    with output(args, "tensor"):
        case(
            lambda shape: {n: run for n, run in chains(shape).items() if n != "tensor us"},
            lambda shape: {"tensor us": chains(shape)["tensor us"]},
            shapes,
            repeats=args.repeats,
            tolerance=lambda shape: 0.03,
            row=lambda shape: {"task": str(shape)},
            unit="us",
            calls=lambda shape: STEPS,
            more=more,
        )


if __name__ == "__main__":
    main()
