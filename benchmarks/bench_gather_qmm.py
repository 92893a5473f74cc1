"""Products with experts beside stock MLX: the first projection of two models, by tokens.

    python benchmarks/bench_gather_qmm.py

Results are compared with stock MLX in float32 before anything is timed. From 64 choices on they are
sorted, as mlx-lm does. Every product chooses anew, so that a cache holds no matrix for the next.
A time is that of one product in a chain of them, which is compiled on a GPU.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
from common import Table, arguments, output
from harness import GPU, Run, case, chain, on, paths, verified

from mlx_qlayers import backend
from mlx_qlayers.ops.gather_qmm import gather_qmm

# Experts, of which so many for a token; outputs and inputs of their first projection.
MODELS = {"Qwen3-30B-A3B": (128, 8, 768, 2048), "Qwen1.5-MoE-A2.7B": (60, 4, 1408, 2048)}
TOKENS = (1, 4, 16, 64, 128, 512) if GPU else (1, 4, 16)
SORTED_FROM = 64
# Products of a chain, each with choices of its own.
SETS = 6 if GPU else 2
FMT = {"group_size": 64, "bits": 4}
Packed = tuple[mx.array, mx.array, mx.array]


@lru_cache(1)
def experts(model: str) -> Packed:
    """Random quantized matrices."""
    count, _, n, k = MODELS[model]
    mx.random.seed(n)
    w, scales, biases = mx.quantize(
        (mx.random.normal((count, n, k)) * k**-0.5).astype(mx.bfloat16), **FMT
    )
    mx.eval(w, scales, biases)
    return w, scales, biases


@cache
def choices(tokens: int, each: int, count: int) -> list[mx.array]:
    """The experts that tokens choose, several times over; in one dimension where sorted."""
    found = []
    for seed in range(SETS):
        scores = mx.random.uniform(shape=(tokens, count), key=mx.random.key(seed))
        chosen = mx.argsort(scores, -1)[:, :each].astype(mx.uint32)
        found.append(mx.sort(chosen.flatten()) if chosen.size >= SORTED_FROM else chosen)
    mx.eval(found)
    return found


class Case(NamedTuple):
    """Rows of some tokens through a model's projection."""

    model: str
    tokens: int

    def inputs(self) -> tuple[mx.array, list[mx.array]]:
        """The rows, and the experts that each product chooses."""
        count, each, _, k = MODELS[self.model]
        indices = choices(self.tokens, each, count)
        sorted_ = indices[0].ndim == 1
        lead = (self.tokens * each, 1) if sorted_ else (self.tokens, 1, 1)
        x = mx.random.normal((*lead, k), key=mx.random.key(1)).astype(mx.bfloat16)
        mx.eval(x)
        return x, indices

    def error(self) -> float:
        """Of our result on the first choices, against stock in float32."""
        x, (indices, *_) = self.inputs()
        packed = experts(self.model)
        w, scales, biases = packed
        wide = (w, scales.astype(mx.float32), biases.astype(mx.float32))
        truth = stock(x.astype(mx.float32), wide, indices)
        ways = {path: on(path, lambda: ours(x, packed, indices)) for path in paths()}
        return verified(str(self), ways, truth, 2 * mx.finfo(mx.bfloat16).eps + 1e-5)


def stock(x: mx.array, packed: Packed, indices: mx.array) -> mx.array:
    """MLX's product."""
    options = {"sorted_indices": indices.ndim == 1, **FMT}
    return mx.gather_qmm(x, *packed, rhs_indices=indices, transpose=True, **options)


def ours(x: mx.array, packed: Packed, indices: mx.array) -> mx.array:
    """Our product on the backend that is chosen."""
    options = {"sorted_indices": indices.ndim == 1, **FMT}
    return gather_qmm(x, *packed, rhs_indices=indices, **options)


def main() -> None:
    args = arguments(__doc__, repeats=8).parse_args()
    names = ["stock", *paths()]
    names = ["kernel" if name in ("host", "metal", "cuda") else name for name in names]

    def chained(shape: Case, path: str) -> Run:
        (x, indices), packed = shape.inputs(), experts(shape.model)
        function = stock if path == "stock" else on(path, ours)
        return chain(lambda x, chosen: function(x, packed, chosen), x, indices)

    with output(args, "gather_qmm"):
        print(f"milliseconds, bfloat16, 4 bits in groups of 64; kernel on backend {backend()}")
        columns = {"model": 18, "product": 10, "tokens": 6, **dict.fromkeys(names, 12)}
        case(
            lambda shape: {"stock": chained(shape, "stock")},
            lambda shape: {
                "reference" if path == "reference" else "kernel": chained(shape, path)
                for path in paths()
            },
            [Case(model, tokens) for model in MODELS for tokens in TOKENS],
            table=Table(columns | {"ratio": 8, "error": 8}),
            repeats=args.repeats,
            check=Case.error,
            row=lambda shape: {**shape._asdict(), "product": "forward"},
            calls=lambda shape: SETS,
        )


if __name__ == "__main__":
    main()
