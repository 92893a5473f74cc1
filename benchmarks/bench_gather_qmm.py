"""Products with experts beside stock MLX, and the gradients of scales.

    python benchmarks/bench_gather_qmm.py               # a projection of two models, by tokens
    python benchmarks/bench_gather_qmm.py --backward    # the gradient of its input instead
    python benchmarks/bench_gather_qmm.py --host        # kernel against reference, by format
    python benchmarks/bench_gather_qmm.py --gradients   # of scales and biases: time and memory

Every result is compared with stock MLX in float32 before it is timed. From 64 choices on they are
sorted, as mlx-lm does. Every product chooses anew, so that a cache holds no matrix for the next.
On a GPU a time is that of one product in a compiled chain of them; calls are plain calls
of stock and of what `auto` chooses, which Python holds up where products are small.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

import mlx.core as mx
from common import Sample, Table, add_output, measure, peak, print_facts, write_output

from mlx_qlayers import backend, use_backend
from mlx_qlayers.formats import MODES, Format
from mlx_qlayers.metal.quantized_matmul.gradients import scales_and_biases_gradient
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime.spec import Spec

# Experts, of which so many for a token; outputs and inputs of their first projection.
MODELS = {"Qwen3-30B-A3B": (128, 8, 768, 2048), "Qwen1.5-MoE-A2.7B": (60, 4, 1408, 2048)}
SORTED_FROM = 64
CALLS = ("stock calls", "auto calls")
Packed = tuple[mx.array, mx.array, mx.array | None]


def experts(count: int, n: int, k: int, fmt: Format, dtype: mx.Dtype = mx.bfloat16) -> Packed:
    """Random quantized matrices."""
    mx.random.seed(n)
    dense = (mx.random.normal((count, n, k)) * k**-0.5).astype(dtype)
    w, scales, *biases = mx.quantize(dense, *fmt)
    packed = (w, scales, biases[0] if biases else None)
    mx.eval(packed)
    return packed


def choices(tokens: int, each: int, count: int, sets: int = 6) -> list[mx.array]:
    """The experts that tokens choose, several times over; in one dimension where sorted."""
    found = []
    for seed in range(sets):
        scores = mx.random.uniform(shape=(tokens, count), key=mx.random.key(seed))
        chosen = mx.argsort(scores, -1)[:, :each].astype(mx.uint32)
        found.append(mx.sort(chosen.flatten()) if chosen.size >= SORTED_FROM else chosen)
    mx.eval(found)
    return found


class Case(NamedTuple):
    """Products of blocks of rows with the matrices that each of several lists of indices chooses.

    Attributes:
        x: (..., M, K).
        packed: the matrices.
        indices: which of them each product takes, sorted where in one dimension.
        transpose: whether the products are with transposed matrices.
        fmt: how these are quantized.
    """

    x: mx.array
    packed: Packed
    indices: list[mx.array]
    transpose: bool
    fmt: Format


def product(path: str, case: Case, x: mx.array, indices: mx.array) -> mx.array:
    """Our product on a backend, or the stock one."""
    given = x, *case.packed, None, indices, case.transpose, *case.fmt
    if path == "stock":
        return mx.gather_qmm(*given, sorted_indices=indices.ndim == 1)
    with use_backend(path):
        return gather_qmm(*given, sorted_indices=indices.ndim == 1)


def call(path: str, case: Case) -> Callable[[], mx.array]:
    """A product that takes the next of the indices each time."""
    turn = cycle(case.indices)
    return lambda: product(path, case, case.x, next(turn))


def chain(path: str, case: Case, compiled: bool = True) -> Callable[[], list[mx.array]]:
    """Products with all of the indices, compiled once or built by each call."""

    def run(x: mx.array) -> list[mx.array]:
        return [product(path, case, x, chosen) for chosen in case.indices]

    function = mx.compile(run) if compiled else run
    return lambda: function(case.x)


def verify(case: Case) -> None:
    """Compare our result with stock in float32, on the first indices."""
    x, (w, *rest), indices, *_ = case
    wide = [a if a is None or a.dtype == mx.uint8 else a.astype(mx.float32) for a in rest]
    exact = case._replace(x=x.astype(mx.float32), packed=(w, *wide))
    truth = product("stock", exact, exact.x, indices[0])
    found = product(backend(), case, x, indices[0]).astype(mx.float32)
    error = float(mx.abs(found - truth).max() / mx.abs(truth).max())
    allowed = 2 * mx.finfo(x.dtype).eps + 1e-5
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def rows_and_choices(model: str, tokens: int, transpose: bool) -> tuple[mx.array, list[mx.array]]:
    """Rows that go through a model's projection, or back, and the experts that they choose."""
    count, each, n, k = MODELS[model]
    indices = choices(tokens, each, count)
    lead = (tokens * each, 1) if indices[0].ndim == 1 else (tokens, 1, 1)
    x = mx.random.normal((*lead, k if transpose else n), key=mx.random.key(1)).astype(mx.bfloat16)
    mx.eval(x)
    return x, indices


def backward(repeats: int) -> list[Table]:
    """The gradient of the input of a model's first projection."""
    return projections(repeats, transpose=False)


def projections(repeats: int, transpose: bool = True) -> list[Table]:
    """The first projection of a model's experts, or the gradient of its input."""
    on_cpu = backend() in ("host", "reference")
    names = ("stock", "reference", "kernel") if on_cpu else ("stock", "kernel", *CALLS)
    columns = {"model": 18, "product": 10, "tokens": 6} | dict.fromkeys(names, 12) | {"ratio": 8}
    table = Table(columns)
    print(f"milliseconds, bfloat16, 4 bits in groups of 64; kernel on backend {backend()}")
    table.print_header()
    fmt = Format(64, 4)
    for model, (count, _, n, k) in MODELS.items():
        packed = experts(count, n, k, fmt)
        for tokens in (1, 4, 16) if on_cpu else (1, 4, 16, 64, 128, 512):
            x, indices = rows_and_choices(model, tokens, transpose)
            case = Case(x, packed, indices, transpose, fmt)
            if backend() != "reference":
                verify(case)
            times, ratio = (_on_cpu if on_cpu else _on_gpu)(case, repeats)
            table.add(
                model=model,
                product="forward" if transpose else "gradient",
                tokens=tokens,
                **{name: time.scaled(1e3) for name, time in times.items()},
                ratio=ratio,
            )
    return [table]


Measured = tuple[dict[str, Sample], float]


def _on_cpu(case: Case, repeats: int) -> Measured:
    """Single products; the gain of the better of our ways."""
    paths = {"stock": "stock", "reference": "reference"}
    if backend() != "reference":
        paths["kernel"] = backend()
    contenders = {name: call(path, case) for name, path in paths.items()}
    times = measure(contenders, repeats=repeats, warmup=0)
    ours = min(times[name].median for name in times if name != "stock")
    return times, times["stock"].median / ours


def _on_gpu(case: Case, repeats: int) -> Measured:
    """Chains of products; the gain of what `auto` takes in plain calls."""
    contenders = {
        "stock": chain("stock", case),
        "kernel": chain(backend(), case),
        CALLS[0]: chain("stock", case, compiled=False),
        CALLS[1]: chain("auto", case, compiled=False),
    }
    times = measure(contenders, repeats=repeats, least=0.01)
    times = {name: time.scaled(1 / len(case.indices)) for name, time in times.items()}
    return times, times[CALLS[0]].median / times[CALLS[1]].median


def host_gain(repeats: int) -> list[Table]:
    """How many times as fast as the reference the kernel is on a CPU, which the operation holds."""
    counts = (1, 8, 64)
    table = Table({"format": 12, "transposed": 10} | {f"tokens {t}": 9 for t in counts})
    table.print_header()
    for mode, (sizes, widths) in MODES.items():
        for bits in widths:
            fmt = Format(sizes[len(sizes) // 2], bits, mode)
            packed = experts(32, 768, 1024, fmt)
            for transpose in (True, False):
                row: dict[str, float] = {}
                for tokens in counts:
                    indices = choices(tokens, 8, 32)
                    lead = (tokens * 8, 1) if indices[0].ndim == 1 else (tokens, 1, 1)
                    x = mx.random.normal((*lead, 1024 if transpose else 768)).astype(mx.bfloat16)
                    case = Case(x, packed, indices, transpose, fmt)
                    contenders = {path: call(path, case) for path in ("reference", "host")}
                    times = measure(contenders, repeats=repeats, warmup=0)
                    row[f"tokens {tokens}"] = times["reference"].median / times["host"].median
                table.add(format=f"{mode} {bits}", transposed=str(transpose), **row)
    return [table]


def gradients(repeats: int) -> list[Table]:
    """The gradients of scales and biases of one matrix, by autodiff of stock MLX and by kernel."""
    table = Table({"format": 12, "rows": 6, "stock": 14, "kernel": 14, "MB": 8, "kernel MB": 9})
    on_cpu = backend() in ("host", "reference")
    # The stock loops of CPUs take minutes in half precision.
    dtype = mx.float32 if on_cpu else mx.bfloat16
    print(f"milliseconds and memory beyond the arguments, 3584 x 3584, {dtype}")
    table.print_header()
    for fmt in (Format(64, 4), Format(32, 3), Format(128, 8)):
        w, scales, biases = (a for a in experts(1, 3584, 3584, fmt))
        w, scales, biases = w[0], scales[0], biases[0]
        for rows in (1, 16, 128, 512) if on_cpu else (1, 16, 128, 512, 2048):
            x, dy = (mx.random.normal((rows, 3584)).astype(dtype) for _ in range(2))
            mx.eval(x, dy, w, scales, biases)

            contenders = of_scales_and_biases(x, dy, (w, scales, biases), fmt)
            used = {name: peak(function) for name, function in contenders.items()}
            times = measure(contenders, repeats=repeats, warmup=0)
            table.add(
                format=f"{fmt.bits} in {fmt.group_size}",
                rows=rows,
                **{name: time.scaled(1e3) for name, time in times.items()},
                MB=used["stock"],
                **{"kernel MB": used["kernel"]},
            )
    return [table]


def of_scales_and_biases(
    x: mx.array, dy: mx.array, packed: tuple[mx.array, mx.array, mx.array], fmt: Format
) -> dict[str, Callable[[], object]]:
    """The gradients of scales and biases: stock and by kernel."""
    w, scales, biases = packed
    rows, of_rows, *matrix = (Spec.of(a) for a in (x, dy, w, scales))
    call = MatmulCall(rows, PackedMatrix(*matrix), True, fmt)
    launch = scales_and_biases_gradient(call, of_rows, backend())

    def product(scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, w, scales, biases, True, *fmt)

    return {
        "stock": lambda: mx.vjp(product, [scales, biases], [dy])[1],
        "kernel": lambda: launch(x, dy, w),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backward", action="store_true", help="measure the gradient of x instead")
    parser.add_argument("--host", action="store_true", help="measure the kernel's gain instead")
    parser.add_argument("--gradients", action="store_true", help="measure gradients instead")
    parser.add_argument("--repeats", type=int, default=8, help="measurements of each (default: 8)")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    ways = {"backward": backward, "host": host_gain, "gradients": gradients}
    measured = next((ways[name] for name in ways if getattr(args, name)), projections)
    write_output(args, "gather_qmm", measured(args.repeats))


if __name__ == "__main__":
    main()
