"""Attention of many queries, forward and with gradients: kernels, stock, and unfused operators.

Run ``python benchmarks/bench_attention_tiles.py``. Results are first compared with float32 at some
queries. ``stock`` is ``mx.fast.scaled_dot_product_attention`` (with a mask where there is a
window), ``unfused`` the same in plain MLX operators, as it is done in training on Metal, ``kernel``
the forced kernel path, ``auto`` what this package picks. ``MB`` is the peak above the inputs. Short
sequences are timed one call after the other, and in compiled chains of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
from common import Table, arguments, output
from harness import Run, either, on, peak, tasks, verified, with_gradients
from harness import case as compare

from mlx_qlayers.ops.attention import attention
from mlx_qlayers.reference.attention import visible
from mlx_qlayers.runtime.backend import BackendError, backend
from mlx_qlayers.runtime.cuda_ahead import compiled_in_parallel
from mlx_qlayers.runtime.explain import explain

Attention = Callable[[mx.array, mx.array, mx.array], mx.array]
CURVE = [1024, 2048, 4096, 8192, 16384, 32768, 65536]
# Longer ones would need more memory than there is.
UNFUSED_UP_TO = 8192
# Queries that are verified, and calls of a compiled chain.
SAMPLED, CHAIN = 16, 16


@dataclass(frozen=True)
class Case:
    """One comparison, causal."""

    heads: int
    kv_heads: int
    width: int
    length: int
    dtype: mx.Dtype = mx.bfloat16
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    unfused: bool = True
    chained: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        extra = "".join(f" {name} {value}" for name, value in self.options.items())
        extra += " compiled" * self.compiled
        return f"{self.heads}/{self.kv_heads} D={self.width} L={self.length} {kind}{extra}"

    @lru_cache(1)  # noqa: B019
    def inputs(self) -> list[mx.array]:
        """q, k, v and a cotangent."""
        mx.random.seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, h, self.length, self.width) for h in heads]
        made = [mx.random.normal(shape).astype(self.dtype) for shape in shapes]
        mx.eval(made)
        return made

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
        return found | {"kernel": on(DEVICE, ours), "auto": ours}


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


def verify(case: Case) -> float:
    """Hold some queries of each path against float32, and the gradients if only these have one."""
    length, dtype, inputs = case.length, case.dtype, case.inputs()
    rows = mx.sort(mx.random.permutation(length)[:SAMPLED])
    sampled = mx.zeros(length, mx.bool_)
    sampled[rows] = True
    *primals, cotangent = inputs
    cotangent = mx.where(sampled[:, None], cotangent, 0).astype(dtype)
    options = {"scale": case.width**-0.5, "rows": rows, **case.options}
    # A GPU's own products of float32 may be rounded to TF32.
    with mx.stream(mx.cpu if dtype == mx.float32 else mx.default_device()):
        q, k, v, d_out = (a.astype(mx.float32) for a in (*primals, cotangent))
        few = q[:, :, rows], k, v, d_out[:, :, rows]
        truth = with_gradients(partial(unfused, **options), few)()
        mx.eval(truth)

    def of_rows(run: Attention) -> list[mx.array]:
        out, d_q, *others = with_gradients(run, [*primals, cotangent])()
        return [out[:, :, rows], d_q[:, :, rows], *others]

    runs = {name: partial(of_rows, run) for name, run in case.paths().items()}
    return verified(str(case), runs, truth, 1e-3 if dtype == mx.float32 else 4e-2)


def chain(run: Attention, gradients: bool, inputs: list[mx.array]) -> Run:
    """So many calls, each with the result of the last one as queries, traced once."""

    def calls(q: mx.array, k: mx.array, v: mx.array, cotangent: mx.array) -> mx.array:
        for _ in range(CHAIN):
            given = [q, k, v, cotangent]
            q = with_gradients(run, given)()[1] if gradients else run(q, k, v)
        return q

    return partial(mx.compile(calls), *inputs)


def measure(case: Case, table: Table, repeats: int) -> Iterator[str]:
    """Rows for each path, forward and with gradients; what auto picked."""

    def runs(task: Any) -> dict[str, Run]:
        shape, gradients = task
        if shape.compiled:
            found = shape.paths().items()
            return {name: chain(run, gradients, shape.inputs()) for name, run in found}
        return {name: either(task, run) for name, run in shape.paths().items()}

    with compiled_in_parallel():
        error = verify(case)  # of all paths, forward and gradients
    compare(
        runs,
        lambda task: {},
        tasks([case, replace(case, compiled=True)] if case.chained else [case]),
        table=table,
        repeats=repeats,
        check=lambda task: error,
        calls=lambda task: CHAIN if task.shape.compiled else 1,
        more=lambda task, *given: {} if task.shape.compiled else {"MB": peak(given[-1])},
    )
    for d in explain(reset=True):
        if d.op == "attention" and d.reason != "asked for":
            yield f"{case}: {d.path} ({d.reason})"


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
                    used = peak(with_gradients(paths[name], inputs))
                except RuntimeError as error:
                    print(f"{case}, {name}: {error}")
                    continue
                table.add(task=f"{case}, with gradients", path=name, MB=used)


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


def main() -> None:
    args = arguments(__doc__, repeats=3).parse_args()
    if DEVICE == "reference":
        raise BackendError("no backend runs kernels on this machine")
    on_gpu, picked = DEVICE in ("metal", "cuda"), list[str]()
    with output(args, "attention_tiles"):
        curve(CURVE if on_gpu else CURVE[:1], Table())
        mx.clear_cache()
        print()
        table = Table()
        for case in GPU if on_gpu else CPU:
            picked += measure(case, table, args.repeats)
    print("\nwhat auto picked:", *picked, sep="\n")


DEVICE = backend()
if __name__ == "__main__":
    main()
