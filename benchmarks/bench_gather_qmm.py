"""Products with experts beside stock MLX: the first projection of two models, by tokens.

    python benchmarks/bench_gather_qmm.py
    python benchmarks/bench_gather_qmm.py --formats

Results are held to the table of examples before anything is timed. From 64 choices on they
are sorted, as mlx-lm does. Every product chooses anew, so that a cache holds no matrix for the
next. A time is that of one product in a chain of them, which is compiled on a GPU.

With ``--formats`` 16 experts of that size in every format, dtype and order. The columns of a first
call are the seconds in a process of its own, of which as many run as the machine has cores, with
empty folders of compiled kernels; the times behind them are taken from one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
from common import arguments, output
from harness import GPU, Run, case, chain, held, on, paths

from mlx_qlayers import backend
from mlx_qlayers.commands.example import Example
from mlx_qlayers.formats import DEFAULTS, MODES, Format
from mlx_qlayers.ops.gather_qmm import gather_qmm

# Experts, of which so many for a token; outputs and inputs of their first projection.
MODELS = {
    "Qwen3-30B-A3B": (128, 8, 768, 2048),
    "Qwen1.5-MoE-A2.7B": (60, 4, 1408, 2048),
    "16 experts": (16, 8, 768, 2048),
}
TOKENS = (1, 4, 16, 64, 128, 512) if GPU else (1, 4, 16)
SORTED_FROM = 64
# Products of a chain, each with choices of its own.
SETS = 6 if GPU else 2
CHECKED = 12  # rows of a result
Packed = list[mx.array | None]


class Case(NamedTuple):
    """Rows of some tokens through a model's projection, or back."""

    model: str
    tokens: int
    fmt: Format = Format(64, 4)
    kind: str = "bfloat16"
    transpose: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Of the products of MLX and of this package."""
        sorted_ = self.tokens * MODELS[self.model][1] >= SORTED_FROM
        return {**self.fmt._asdict(), "transpose": self.transpose, "sorted_indices": sorted_}

    def inputs(self) -> tuple[mx.array, list[mx.array]]:
        """The rows, and the experts that each product chooses."""
        count, each, n, k = MODELS[self.model]
        indices = choices(self.tokens, each, count)
        lead = (self.tokens * each, 1) if indices[0].ndim == 1 else (self.tokens, 1, 1)
        shape = *lead, k if self.transpose else n
        x = mx.random.normal(shape, key=mx.random.key(1)).astype(getattr(mx, self.kind))
        mx.eval(x)
        return x, indices

    def row(self) -> dict[str, Any]:
        """The columns that name it."""
        which = "forward" if self.transpose else "gradient"
        found = {"model": self.model, "product": which, "tokens": self.tokens}
        return found | {"mode": self.fmt.mode, "bits": self.fmt.bits, "dtype": self.kind}

    def packed(self) -> Packed:
        """The experts."""
        return experts(self.model, self.fmt, self.kind)

    def error(self) -> float:
        """Of some rows of our results for the first choices, over the largest number."""
        x, (indices, *_) = self.inputs()
        rows = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:])).reshape(-1, 1, x.shape[-1])
        at = mx.linspace(0, len(rows) - 1, min(CHECKED, len(rows))).astype(mx.uint32)
        chosen = indices.flatten()[at]
        names = "w", "scales", "biases"
        given = {
            n: a if a is None else a[chosen] for n, a in zip(names, self.packed(), strict=True)
        }
        given |= {"x": rows[at], "rhs_indices": mx.arange(len(at)), **self.options}
        call = Example(str(self), gather_qmm, given, terms=x.shape[-1], steps=1)

        def of_rows(path: str) -> mx.array:
            return on(path, ours)(x, indices, self).reshape(len(rows), 1, -1)[at]

        return held(call, *(partial(of_rows, path) for path in paths()))


@lru_cache(1)
def experts(model: str, fmt: Format, kind: str) -> Packed:
    """Random quantized matrices."""
    count, _, n, k = MODELS[model]
    mx.random.seed(n)
    with mx.stream(mx.cpu if fmt.bits == 1 else mx.default_device()):
        dense = (mx.random.normal((count, n, k)) * k**-0.5).astype(getattr(mx, kind))
        packed = [*mx.quantize(dense, **fmt._asdict()), None][:3]
        mx.eval(packed)
    return packed


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


def stock(x: mx.array, indices: mx.array, shape: Case) -> mx.array:
    """MLX's product."""
    return mx.gather_qmm(x, *shape.packed(), rhs_indices=indices, **shape.options)


def ours(x: mx.array, indices: mx.array, shape: Case) -> mx.array:
    """Our product on the backend that is chosen."""
    return gather_qmm(x, *shape.packed(), rhs_indices=indices, **shape.options)


def chained(shape: Case, path: str) -> Run:
    """Products of one path, each with choices of its own."""
    x, indices = shape.inputs()
    function = stock if path == "stock" else on(path, ours)
    return chain(lambda x, chosen: function(x, chosen, shape), x, indices)


def all_formats() -> list[Case]:
    """One case of each size, format, dtype and order."""
    formats = [
        Format(DEFAULTS[mode][0], bits, mode) for mode, (_, widths) in MODES.items()
        for bits in widths
    ]  # fmt: skip
    kinds = product(formats, ("bfloat16", "float16", "float32"), (True, False), (1, 64))
    return [Case("16 experts", tokens, *kind) for *kind, tokens in kinds]


def first_calls(shapes: list[Case]) -> dict[Case, dict[str, Any]]:
    """Seconds of each path's first call, and what MLX says where it has no such product."""

    def measured(index: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--first", str(index)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if not done.returncode else {"failed": done.stderr[-300:]}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(shapes, pool.map(measured, range(len(shapes))), strict=True))


def first(shape: Case) -> dict[str, Any]:
    """Seconds of the first calls of a case, in a process of its own."""
    x, (indices, *_) = shape.inputs()
    mx.eval(shape.packed(), x)
    found: dict[str, Any] = {}
    for name, function in (("kernel", on(paths()[-1], ours)), ("stock", stock)):
        start = time.perf_counter()
        try:
            mx.eval(function(x, indices, shape))
        except (RuntimeError, ValueError) as error:
            found["stock has none"] = str(error).splitlines()[0]
        else:
            found[f"first {name}"] = time.perf_counter() - start
    return found


def main() -> None:
    parser = arguments(__doc__, repeats=8)
    parser.add_argument("--formats", action="store_true", help="every format, dtype and order")
    parser.add_argument("--first", type=int, help="a case of --formats, in this process alone")
    args = parser.parse_args()
    if args.first is not None:
        return print(json.dumps(first(all_formats()[args.first])))
    small = [Case(model, tokens) for model in list(MODELS)[:2] for tokens in TOKENS]
    shapes = all_formats() if args.formats else small
    firsts = first_calls(shapes) if args.formats else {}
    lacking = {shape for shape, found in firsts.items() if "first stock" not in found}
    with output(args, "gather_qmm_formats" if args.formats else "gather_qmm"):
        print(f"milliseconds; kernel on backend {backend()}")
        case(
            lambda shape: {} if shape in lacking else {"stock": chained(shape, "stock")},
            lambda shape: {
                "reference" if path == "reference" else "kernel": chained(shape, path)
                for path in paths()
            },
            shapes,
            repeats=args.repeats,
            check=Case.error,
            row=Case.row,
            calls=lambda shape: SETS,
            more=lambda shape, _: firsts.get(shape, {}),
        )


if __name__ == "__main__":
    main()
