"""Batch-invariant models on GPUs that are not here: what they choose, and its bits on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from batches import PROMPT, Batches, converted, rules_of
from mlx_lm.models.cache import RotatingKVCache

from mlx_qlayers import convert_model, quantized_matmul, use_backend
from mlx_qlayers.decode import engine
from mlx_qlayers.formats import Format
from mlx_qlayers.ops.attention_invariant import attention_from
from mlx_qlayers.ops.gather_qmm import gather_qmm
from mlx_qlayers.runtime.backend import Context, current, within
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.tracing import Record, trace

GPUS = {
    "M1": lambda machine: machine.apple("applegpu_g13g"),
    "M3": lambda machine: machine.apple("applegpu_g15s"),
    "M5": lambda machine: machine.apple(),
    "H100": lambda machine: machine.nvidia(),
}
INVARIANT = Context(invariant=True)
# Prompts of several splits of keys, of a model that computes them in seconds.
LONG = {"phi3": PROMPT}
# Template values that say how many rows share a weight and how many columns a row, and no more.
ROWS = ("rows", "outputs", "fragments", "simds_n", "SHARED")


@pytest.fixture(params=GPUS)
def gpu(request, machine):
    """A GPU that is not here, on which nothing runs."""
    GPUS[request.param](machine)
    machine.giving_zeros("cuda" if request.param == "H100" else "metal")


def launched(operation: Callable[..., Any], *args: Any, **options: Any) -> list[Record]:
    """The launches of a call in a batch-invariant model."""
    with within(current, INVARIANT), trace() as launches:
        operation(*args, **options)
    return launches


def kernels(launches: list[Record]) -> frozenset[Any]:
    """The kernels of a call with template and threads of a threadgroup, without grids."""
    return frozenset(
        (
            each.kernel,
            *sorted((k, str(v)) for k, v in each.template.items() if k not in ROWS),
            each.threadgroup[0] // each.template.get("simds_n", 1),
        )
        for each in launches
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_gpus_have_one_kernel_for_all_rows(gpu, dtype):
    """Products of 1 to 64 rows and more, however they are batched, and those with experts."""
    for n, k, fmt in (
        (512, 1024, Format(64, 4)),
        (96, 256, Format(32, 3)),
        (4096, 384, Format(64, 8)),
        (16384, 1024, Format(64, 4)),
    ):
        sizes = (k * fmt.bits // 32, mx.uint32), *[(k // fmt.group_size, dtype)] * 2
        packed = [mx.zeros((n, columns), kind) for columns, kind in sizes]
        shapes = [(b, m, k) for b in (1, 2, 16, 64) for m in (*range(1, 18), 63, 64)]
        given = *packed, True, *fmt
        calls = (launched(quantized_matmul, mx.zeros(s, dtype), *given) for s in shapes)
        (one,) = {*map(kernels, calls)}
        assert len(one) == 1
        matrices = [mx.zeros((8, *each.shape), each.dtype) for each in packed]
        found = set()
        for p, is_sorted in product((1, 2, 8, 63, 64, 512), (False, True)):
            x, chosen = mx.zeros((p, 1, k), dtype), mx.zeros((p,), mx.uint32)
            given = x, *matrices, None, chosen, True, *fmt
            found.add(kernels(launched(gather_qmm, *given, sorted_indices=is_sorted)))
        (one,) = found
        assert len(one) == 1


@pytest.mark.parametrize("bits", [0, 8])
def test_gpus_split_keys_by_their_places(gpu, bits):
    """The number of splits grows with the keys; of a split nothing depends on the call."""
    splits, found = {}, set()
    for batch, queries, keys, kind in product(
        (1, 2, 64), (1, 2, 7, 16), (17, 256, 257, 512, 513, 3000), ("causal", "array")
    ):
        q = mx.zeros((batch, 8, queries, 64), mx.bfloat16)
        sizes = [(16, mx.uint32), *[(1, q.dtype)] * 2] if bits else [(64, q.dtype)]
        kv = tuple(mx.zeros((batch, 2, keys, width), dtype) for width, dtype in sizes)
        kv = kv if bits else kv[0]
        mask = kind if kind == "causal" else mx.zeros((batch, 1, queries, keys), mx.bool_)
        starts = mx.zeros((batch,), mx.int32)
        given = {"scale": 0.125, "mask": mask, "sinks": None}
        launches = launched(attention_from, starts, q, kv, kv, **given)
        found.add(kernels(launches))
        grids = [(e.threadgroup[0], e.grid) for e in launches if "decode" in e.kernel]
        for threads, grid in grids:
            assert splits.setdefault(keys, grid[0] // threads) == grid[0] // threads
            assert grid[2] == batch
        rows = sum(grid[1] for _, grid in grids)  # eight in a threadgroup, for each key head
        assert len(grids) > 1 or rows == 2 * -(-4 * queries // 8)
    few, many = sorted(found, key=len)
    assert {name for name, *_ in many} >= {"attention_combine"} and (len(few), len(many)) == (1, 2)
    assert splits == {s: -(-s // 256) for s in splits}


@pytest.mark.parametrize(
    ("rules", "name", "dtype", "checked"),
    [("cuda", "qwen3_moe", mx.bfloat16, True), ("metal", "phi3", mx.float32, False)],
)
def test_kernels_of_gpus_give_the_same_bits(rules, name, dtype, checked):
    """Run on the CPU: keys are more than a split, rows more than a launch takes."""
    with rules_of(rules), use_backend("host"), checks() if checked else nullcontext():
        batches = Batches(converted(name, dtype), texts=2, tokens=36, prompt=LONG.get(name, 1))
        for _ in range(3):
            batches.one(6)
        batches.one(40)
    assert batches.compared > 7_000 and not batches.differing


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("phi3", mx.float32),
        ("phi3", mx.bfloat16),
        ("qwen2", mx.float16),
        ("qwen3_moe", mx.bfloat16),
    ],
)
def test_graphs_of_steps_give_the_bits_of_prompts(name, dtype, graphs):
    with rules_of("cuda"), use_backend("host"):
        model = converted(name, dtype)
        batches = Batches(model, texts=2, tokens=36, prompt=LONG.get(name, 1))
        for _ in range(3):
            batches.one(6)
    assert engine.stopped(model) is None
    assert batches.compared > 7_000 and not batches.differing


def test_a_model_whose_graphs_have_other_bits_runs_its_own_code(graphs, monkeypatch):
    export = mx.export_function

    def exported(told: Callable[[Any], None], *given: Any) -> None:
        """The graph of another activation than the model has."""

        def renamed(each: Any) -> None:
            told(each | {"name": "Tanh"} if each.get("name") == "Sigmoid" else each)

        export(renamed, *given)

    monkeypatch.setattr(mx, "export_function", exported)
    with rules_of("cuda"), use_backend("host"):
        model = converted("qwen2", mx.bfloat16)
        assert engine.stopped(model) is None  # they were compared
        batches = Batches(model, texts=2, tokens=24)
        batches.one(6)
    assert batches.compared and not batches.differing


def test_what_a_gpu_cannot_do_is_refused_by_name():
    model = build("phi3", ARCHITECTURES["phi3"])
    model.lm_head = nn.Linear(128, VOCABULARY)
    rotating = [RotatingKVCache(6) for _ in model.layers]
    with rules_of("metal"):
        with pytest.raises(ValueError, match=r"takes no Linear on a GPU, .*: lm_head"):
            convert_model(model, batch_invariant=True, calibrate=False)
        model = converted("phi3", mx.float32)
        with pytest.raises(ValueError, match="take no rotating caches"):
            model(mx.array([[3]]), cache=rotating)


def test_keys_that_nobody_sees_are_not_read():
    """A padded buffer of a step costs what it holds, and a prompt half of a square."""
    q, k = (mx.random.normal((1, 2, n, 64), key=mx.random.key(n)) for n in (1, 512))
    read, found = {}, []
    for count in (40, 512):
        mask, starts = mx.arange(512)[None] < count, mx.zeros((1,), mx.int32)
        given = {"scale": 0.125, "mask": mask, "sinks": None}
        as_model = within(current, INVARIANT)
        with rules_of("cuda"), use_backend("host"), as_model, checks() as report:
            mx.eval(out := attention_from(starts, q, k, k, **given))
        read[count], found = report.total("bytes_read"), [*found, out]
    assert 4 * read[40] < read[512]
    few = mx.fast.scaled_dot_product_attention(q, k[:, :, :40], k[:, :, :40], scale=0.125)
    assert mx.allclose(found[0], few, atol=1e-5)
