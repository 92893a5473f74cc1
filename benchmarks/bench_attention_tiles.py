"""Attention of many queries, forward and with gradients: kernels, stock, and unfused operators.

Run ``python benchmarks/bench_attention_tiles.py``. Results are first compared with float32 at some
queries. ``stock`` is ``mx.fast.scaled_dot_product_attention`` (with a mask where there is a
window), ``unfused`` the same in plain MLX operators, as it is done in training on Metal, ``kernel``
the forced kernel path, ``auto`` what this package picks. ``MB`` is the peak above the inputs. Short
sequences are timed one call after the other, and in compiled chains of calls.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import mlx.core as mx
from common import Table, add_output, measure, output, peak, print_facts

from mlx_qlayers.ops.attention import attention
from mlx_qlayers.reference.attention import visible
from mlx_qlayers.runtime.backend import BackendError, backend, use_backend
from mlx_qlayers.runtime.explain import explain

Attention = Callable[[mx.array, mx.array, mx.array], mx.array]
COLUMNS = {"task": 58, "path": 8, "ms": 14, "ratio": 7, "TFLOP/s": 8, "MB": 8}
CURVE = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
# Longer ones would need more memory than there is.
UNFUSED_UP_TO = 8192
# Queries that are verified, calls of a compiled chain, and how many times as often as others short
# sequences are measured: what the CPU does meanwhile shows in them.
SAMPLED, CHAIN, SHORT = 16, 16, 3


@dataclass(frozen=True)
class Case:
    """One comparison, causal."""

    heads: int
    kv_heads: int
    width: int
    length: int
    dtype: mx.Dtype = mx.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    unfused: bool = True
    chained: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        extra = "".join(f" {name} {value}" for name, value in self.options.items())
        return f"{self.heads}/{self.kv_heads} D={self.width} L={self.length} {kind}{extra}"

    def inputs(self) -> list[mx.array]:
        """q, k, v and a cotangent."""
        mx.random.seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, h, self.length, self.width) for h in heads]
        made = [mx.random.normal(shape).astype(self.dtype) for shape in shapes]
        mx.eval(made)
        return made

    def flops(self, gradients: bool) -> float:
        """Of the products that cannot be left out: two forward, five more for the gradients."""
        window = min(self.options.get("window", self.length), self.length)
        pairs = window * self.length - window * (window - 1) / 2
        return 2 * pairs * self.width * self.heads * (7 if gradients else 2)

    def paths(self) -> dict[str, Attention]:
        """The contenders by name."""
        scale, window = self.width**-0.5, self.options.get("window")
        mask = "causal" if window is None else visible(self.length, self.length, window)
        stock = partial(mx.fast.scaled_dot_product_attention, scale=scale, mask=mask)
        ours = partial(attention, scale=scale, mask="causal", **self.options)
        found: dict[str, Attention] = {}
        if "softcap" not in self.options:
            found["stock"] = stock
        if self.unfused:
            found["unfused"] = partial(unfused, scale=scale, **self.options)
        return found | {"kernel": partial(forced, ours), "auto": ours}


def unfused(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rows: mx.array | None = None,
) -> mx.array:
    """Scores, mask, softmax and sums one after the other, of queries at ``rows`` if not of all."""
    batch, heads, length, width = q.shape
    groups = (q * scale).reshape(batch, k.shape[1], -1, length, width)
    scores = groups @ k[:, :, None].swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    seen = visible(k.shape[2], k.shape[2], window)
    seen = seen if rows is None else seen[rows]
    scores = mx.where(seen, scores, mx.finfo(scores.dtype).min)
    out = mx.softmax(scores, axis=-1, precise=True) @ v[:, :, None]
    return out.reshape(batch, heads, length, -1)


def forced(run: Attention, *inputs: mx.array) -> mx.array:
    with use_backend(DEVICE):
        return run(*inputs)


def with_gradients(run: Attention, *inputs: mx.array) -> list[mx.array]:
    *primals, cotangent = inputs
    outputs, gradients = mx.vjp(lambda *given: [run(*given)], primals, [cotangent])
    return [*outputs, *gradients]


def verify(case: Case, paths: dict[str, Attention], inputs: list[mx.array]) -> None:
    """Hold some queries of each path against float32, and the gradients if only these have one."""
    length, dtype = case.length, case.dtype
    rows = mx.sort(mx.random.permutation(length)[:SAMPLED])
    sampled = mx.zeros(length, mx.bool_)
    sampled[rows] = True
    *primals, cotangent = inputs
    cotangent = mx.where(sampled[:, None], cotangent, 0).astype(dtype)
    options = {"scale": case.width**-0.5, "rows": rows, **case.options}
    # A GPU's own products of float32 may be rounded to TF32.
    with mx.stream(mx.cpu if dtype == mx.float32 else mx.default_device()):
        q, k, v, d_out = (a.astype(mx.float32) for a in (*primals, cotangent))
        expected = with_gradients(
            partial(unfused, **options), q[:, :, rows], k, v, d_out[:, :, rows]
        )
        mx.eval(expected)
    for name, run in paths.items():
        out, d_q, *others = with_gradients(run, *primals, cotangent)
        found = [out[:, :, rows], d_q[:, :, rows], *others]
        for mine, truth in zip(found, expected, strict=True):
            error = (mx.abs(mine.astype(mx.float32) - truth).max() / mx.abs(truth).max()).item()
            assert error < (1e-3 if dtype == mx.float32 else 4e-2), f"{case} {name}: {error}"


def chain(run: Attention, gradients: bool) -> Callable[..., Any]:
    """So many calls, each with the result of the last one as queries, traced once."""

    def calls(q: mx.array, k: mx.array, v: mx.array, cotangent: mx.array) -> mx.array:
        for _ in range(CHAIN):
            q = with_gradients(run, q, k, v, cotangent)[1] if gradients else run(q, k, v)
        return q

    return mx.compile(calls)


def prepare(number: int) -> None:
    """Have the kernels of a case compiled; those are kept on disk."""
    short = replace(cases()[number], length=64)
    verify(short, short.paths(), short.inputs())


def compare(number: int, repeats: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a case and what auto picked."""
    case = cases()[number]
    rows = list(measured(case, repeats))
    picked = [d for d in explain() if d.op == "attention" and d.reason != "asked for"]
    return rows, [f"{case}: {d.path} ({d.reason})" for d in picked]


def measured(case: Case, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each path, forward and with gradients."""
    inputs, paths = case.inputs(), case.paths()
    verify(case, paths, inputs)
    for gradients in (False, True):
        given = inputs if gradients else inputs[:3]
        plain: dict[str, Callable[[], Any]] = {
            name: partial(with_gradients, run, *given) if gradients else partial(run, *given)
            for name, run in paths.items()
        }
        kinds = {"": (plain, 1)}
        if case.chained:
            chains = {name: partial(chain(run, gradients), *inputs) for name, run in paths.items()}
            kinds[" compiled"] = (chains, CHAIN)
        for kind, (runs, calls) in kinds.items():
            found = measure(runs, repeats=(SHORT if case.chained else 1) * repeats)
            times = {n: t.scaled(1 / calls) for n, t in found.items()}
            first = next(iter(times.values()))
            for name, taken in times.items():
                row = {
                    "task": f"{case}{kind}, {'with gradients' if gradients else 'forward'}",
                    "path": name,
                    "ms": taken.scaled(1e3),
                    "ratio": f"{first.median / taken.median:.2f}x",
                    "TFLOP/s": case.flops(gradients) / taken.median / 1e12,
                }
                if calls == 1:
                    row["MB"] = peak(runs[name])
                yield row


def curve(lengths: list[int], table: Table) -> None:
    """Peak memory by length: of the kernel, and with gradients of the others too."""
    for length in lengths:
        case = Case(32, 8, 128, length, unfused=length <= UNFUSED_UP_TO)
        inputs, paths = case.inputs(), case.paths()
        kernel = paths["kernel"]
        table.add(task=f"{case}, forward", path="kernel", MB=peak(partial(kernel, *inputs[:3])))
        for name in ("kernel", "stock", "unfused"):
            if name in paths:
                # Of 64k tokens stock makes all scores.
                try:
                    used = peak(partial(with_gradients, paths[name], *inputs))
                except RuntimeError as error:
                    print(f"{case}, {name}: {error}")
                    continue
                table.add(task=f"{case}, with gradients", path=name, MB=used)


def cases() -> list[Case]:
    return GPU if DEVICE in ("metal", "cuda") else CPU


GPU = [
    Case(32, 32, 64, 4096),
    Case(32, 32, 128, 4096),
    Case(32, 8, 128, 8192),
    Case(32, 8, 128, 16384, unfused=False),
    Case(32, 8, 128, 16384, options={"window": 1024}, unfused=False),
    Case(32, 8, 256, 2048),
    Case(32, 8, 64, 2048, mx.float32),
    Case(32, 8, 128, 4096, options={"window": 1024}),
    Case(32, 8, 128, 2048, options={"softcap": 30.0}),
    Case(32, 8, 128, 256, chained=True),
    Case(32, 8, 128, 512, chained=True),
    Case(32, 8, 128, 1024, chained=True),
    Case(12, 12, 64, 128, mx.float16, chained=True),
    Case(32, 8, 256, 256, chained=True),
    Case(32, 8, 128, 256, options={"window": 64}, chained=True),
    Case(32, 8, 128, 256, options={"softcap": 30.0}, chained=True),
]
CPU = [
    Case(4, 4, 64, 128, mx.float32),
    Case(4, 4, 64, 512, mx.float32),
    Case(4, 4, 64, 512, mx.bfloat16),
]


def run(args: argparse.Namespace) -> None:
    """Print the tables and what auto picked; ``args`` has the repeats and where to write."""
    table, memory = Table(COLUMNS), Table({"task": 58, "path": 8, "MB": 10})
    spawn, numbers, picked = get_context("spawn"), range(len(cases())), list[str]()
    # Compiling takes longest: all at once. Then nothing else runs while one is measured, in a
    # process of its own.
    workers = min(len(numbers), max(1, (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(workers, spawn) as pool:
        list(pool.map(prepare, numbers))
    with output(args, "attention_tiles"):
        memory.print_header()
        curve(CURVE if cases() is GPU else CURVE[:1], memory)
        mx.clear_cache()
        print()
        table.print_header()
        for number in numbers:
            with ProcessPoolExecutor(1, spawn) as process:
                rows, lines = process.submit(compare, number, args.repeats).result()
            picked += lines
            for row in rows:
                table.add(**row)
    print("\nwhat auto picked:")
    print("\n".join(picked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    run(args)


DEVICE = backend()
if __name__ == "__main__":
    if DEVICE == "reference":
        raise BackendError("no backend runs kernels on this machine")
    main()
