"""Attention, grid sampling and small 4-bit products beside stock MLX and PyTorch, in one process.

``python benchmarks/bench_peers.py [--attention] [--products] [--sampling]`` needs an NVIDIA GPU and
PyTorch. Results of the same inputs are compared first, but for products: PyTorch packs weights in
another way. A row has microseconds a call, with so many calls in flight: the best of three
measurements in which the contenders took turns.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

# Ahead of MLX: the cuDNN that is loaded first serves both, and PyTorch needs its own.
try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    raise SystemExit("bench_peers.py compares with PyTorch, which is not installed here") from None

import mlx.core as mx
import numpy as np
from common import Table, add_output, output, print_facts

from mlx_qlayers import attention, grid_sample, quantized_matmul
from mlx_qlayers.runtime.cuda_ahead import together

# Heads, key heads, width of a head, length; causal, bfloat16, batch 1.
HEADS = ((32, 32, 64), (28, 4, 128), (8, 8, 256))
ATTENTION = [(*heads, 4096) for heads in HEADS]
ATTENTION += [(28, 4, 128, 16384), (32, 32, 64, 1024), (32, 8, 128, 2048)]
# Images, points along an axis, and whether in half precision.
IMAGES = ((16, 512, 512, 1), 512), ((16, 512, 512, 3), 512), ((8, 1024, 1024, 64), 256)
SAMPLING = [(*case, half) for case in IMAGES for half in (False, True)]
# Rows and columns of a weight, and products of a chain.
PRODUCTS = [(3584, 3584, 20), (3584, 18944, 6)]
BATCHES = 1, 2, 4, 8, 16
# In flight: the first one begins about 0.1 ms late.
CALLS = 32

Run = Callable[[], Any]


def best(runs: Mapping[str, Run], calls: int) -> dict[str, float]:
    """Microseconds a call of each, `calls` in flight."""
    times = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        finish([run(), run()])
    for _ in range(3):
        for name, run in runs.items():
            start = time.perf_counter()
            finish([begun(run()) for _ in range(calls)])
            times[name] = min(times[name], (time.perf_counter() - start) / calls * 1e6)
    return times


def begun(result: list[Any]) -> list[Any]:
    """Have MLX begin, as PyTorch does of itself, while Python makes the next call."""
    mx.async_eval([a for a in result if isinstance(a, mx.array)])
    return result


def finish(results: Any) -> None:
    """Wait for what MLX has been asked for and PyTorch has begun."""
    mx.eval([a for result in results for a in result if isinstance(a, mx.array)])
    torch.cuda.synchronize()


def as_torch(array: mx.array, dtype: Any) -> Any:
    """A copy on PyTorch's GPU."""
    return torch.from_numpy(np.array(array.astype(mx.float32))).to("cuda", dtype)


def compare(theirs: list[Any], ours: list[mx.array], tolerance: float) -> None:
    """Stop where PyTorch's results differ by more than this part of the largest number."""
    for one, other in zip(theirs, ours, strict=True):
        truth = mx.array(one.detach().float().cpu().numpy())
        error = (mx.abs(other.astype(mx.float32) - truth).max() / mx.abs(truth).max()).item()
        if not error <= tolerance:
            raise SystemExit(f"results differ by {error}")


def attention_row(table: Table, heads: int, kv_heads: int, width: int, length: int) -> None:
    """Forward, and with the gradients of queries, keys and values."""
    shapes = [(1, h, length, width) for h in (heads, kv_heads, kv_heads, heads)]
    arrays = [mx.random.normal(shape).astype(mx.bfloat16) for shape in shapes]
    mx.eval(arrays)
    options: dict[str, Any] = {"scale": width**-0.5, "mask": "causal"}
    contenders = {"stock": mx.fast.scaled_dot_product_attention, "ours": attention}

    def alone(run: Any) -> list[mx.array]:
        return [run(*arrays[:3], **options)]

    def with_gradients(run: Any) -> list[mx.array]:
        outputs, gradients = mx.vjp(lambda *a: [run(*a, **options)], arrays[:3], arrays[3:])
        return [*outputs, *gradients]

    forward: dict[str, Run] = {name: partial(alone, run) for name, run in contenders.items()}
    gradients: dict[str, Run] = {n: partial(with_gradients, r) for n, r in contenders.items()}
    with together():
        gradients["ours"]()
    *inputs, cotangent = [as_torch(a, torch.bfloat16) for a in arrays]
    given = {"scale": width**-0.5, "is_causal": True, "enable_gqa": heads != kv_heads}

    def theirs() -> list[Any]:
        return [torch.nn.functional.scaled_dot_product_attention(*inputs, **given)]

    def torch_gradients() -> list[Any]:
        for each in inputs:
            each.requires_grad_()
        outputs = theirs()
        return [*outputs, *torch.autograd.grad(outputs, inputs, cotangent)]

    forward["cuDNN"], gradients["cuDNN"] = theirs, torch_gradients
    calls = 4 if length > 8192 else CALLS
    row = {"causal": f"{heads}/{kv_heads} D{width} {length}", "calls": calls}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        row |= best(forward, calls)
        compare(torch_gradients(), gradients["ours"](), 0.03)
        times = best(gradients, calls)
    table.add(**row, **{f"{name} grad": value for name, value in times.items()})


def sampling_row(table: Table, shape: Sequence[int], side: int, half: bool) -> None:
    """Forward and with both gradients, bilinear, random points; also with channels last."""
    dtype, torch_dtype = (mx.float16, torch.float16) if half else (mx.float32, torch.float32)
    x = mx.random.normal(shape).astype(dtype)
    grid = mx.random.uniform(-1, 1, (shape[0], side, side, 2))
    cotangent = mx.random.normal((*grid.shape[:3], shape[3])).astype(dtype)
    mx.eval(x, grid, cotangent)

    def ours() -> list[mx.array]:
        outputs, found = mx.vjp(lambda *a: [grid_sample(*a)], [x, grid], [cotangent])
        return [*outputs, *found]

    with together():
        ours()
    forward: dict[str, Run] = {"ours": lambda: [grid_sample(x, grid)]}
    gradients: dict[str, Run] = {"ours": ours}
    last, given = (as_torch(a, torch_dtype).permute(0, 3, 1, 2) for a in (x, cotangent))
    theirs = as_torch(grid, torch_dtype).requires_grad_()

    def sample(image: Any) -> list[Any]:
        return [torch.nn.functional.grid_sample(image, theirs, align_corners=False)]

    def both(image: Any) -> list[Any]:
        outputs = sample(image)
        return [*outputs, *torch.autograd.grad(outputs, (image, theirs), given)]

    for name, image in {"torch": last.contiguous(), "last": last}.items():
        image = image.detach().requires_grad_()
        forward[name], gradients[name] = partial(sample, image), partial(both, image)
    if not half:
        # In half precision PyTorch rounds the points.
        out, d_image, d_grid = both(image)
        rows = [a.permute(0, 2, 3, 1) for a in (out, d_image)]
        compare([*rows, d_grid], ours(), 1e-3)
    calls = 8 if shape[3] > 3 else CALLS
    row = {"points": f"{'x'.join(map(str, shape))} {str(dtype)[9:]}", "calls": calls}
    row |= best(forward, calls)
    table.add(**row, **{f"{name} grad": value for name, value in best(gradients, calls).items()})


def product_rows(table: Table, n: int, k: int, count: int) -> None:
    """Chains of products, bfloat16, groups of 64; PyTorch's int4 kernel eager and as CUDA graph."""
    weights, flat = [], []
    for _ in range(count):
        flat += mx.quantize(mx.random.normal((n, k)).astype(mx.bfloat16) * k**-0.5, 64, 4)
        mx.eval(flat[-3:])
        words = torch.randint(0, 255, (n, k // 2), device="cuda", dtype=torch.uint8)
        scales = torch.rand(k // 64, n, 2, device="cuda", dtype=torch.bfloat16) * 0.01
        weights.append((torch.ops.aten._convert_weight_to_int4pack(words, 8), scales))

    def chain(x: mx.array, *flat: mx.array) -> list[mx.array]:
        results = [x]
        for i in range(0, len(flat), 3):
            y = results.pop() if n == k else x
            results.append(quantized_matmul(y, *flat[i : i + 3], group_size=64, bits=4))
        return results

    compiled = mx.compile(chain)

    def ours(x: mx.array) -> list[mx.array]:
        results = compiled(x, *flat)
        return results

    def theirs(x: Any) -> list[Any]:
        y = x
        for weight, scales in weights:
            y = torch.ops.aten._weight_int4pack_mm(y if n == k else x, weight, 64, scales)
        return [y]

    for rows in BATCHES:
        x = mx.random.normal((rows, k)).astype(mx.bfloat16)
        eager = partial(theirs, as_torch(x, torch.bfloat16))
        finish([eager()])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            eager()
        runs = {"ours": partial(ours, x), "eager": eager, "graph": partial(replay, graph)}
        row: dict[str, Any] = {"4 bits": f"{n}x{k}", "M": rows}
        row |= {name: value / count for name, value in best(runs, 16).items()}
        row |= {f"{name} one": value / count for name, value in best(runs, 1).items()}
        table.add(**row)


def replay(graph: Any) -> list[Any]:
    """Run a CUDA graph, which gives nothing."""
    graph.replay()
    return []


# The first columns, the contenders, what they do besides, a function that adds rows, and its cases.
PARTS: dict[str, tuple[dict[str, int], str, str, Callable[..., None], Sequence[Any]]] = {
    "attention": ({"causal": 16, "calls": 5}, "stock ours cuDNN", "grad", attention_row, ATTENTION),
    "products": ({"4 bits": 11, "M": 3}, "ours eager graph", "one", product_rows, PRODUCTS),
    "sampling": ({"points": 27, "calls": 5}, "ours torch last", "grad", sampling_row, SAMPLING),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part alone")
    add_output(parser)
    args = parser.parse_args()
    if not (mx.cuda.is_available() and torch.cuda.is_available()):
        raise SystemExit("bench_peers.py needs an NVIDIA GPU that both MLX and PyTorch can use")
    print_facts()
    print(f"PyTorch {torch.__version__}, microseconds\n", flush=True)
    with output(args, "peers"):
        for part in [part for part in PARTS if getattr(args, part)] or PARTS:
            first, contenders, more, add_rows, cases = PARTS[part]
            names = contenders.split()
            table = Table(first | dict.fromkeys([*names, *(f"{n} {more}" for n in names)], 10))
            table.print_header()
            for case in cases:
                mx.random.seed(0)
                add_rows(table, *case)
                gc.collect()
                mx.clear_cache()
                torch.cuda.empty_cache()
            print(flush=True)


if __name__ == "__main__":
    main()
