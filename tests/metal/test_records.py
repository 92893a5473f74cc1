"""The families that can be tuned agree with their kernels."""

from dataclasses import replace

import mlx.core as mx
import pytest
from counted import Counted
from numerics import FACTOR

from mlx_qlayers import use_backend
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.records import RECORDS
from mlx_qlayers.options import Router
from mlx_qlayers.reference import quantized_matmul as reference
from mlx_qlayers.tuning.tune import tune

FMT = Format(64, 4)
# Keys of operations, and the names under which answers are stored.
ASKED = {
    "qmv": ((3, 40, 128, mx.float16, FMT), "3x40x128 float16 affine-64-4-t"),
    "qmm_skinny": ((17, 40, 128, mx.bfloat16, FMT), "24x40x128 bfloat16 affine-64-4-t"),
    "qmm": ((17, 40, 128, mx.float16, FMT, True), "32x40x128 float16 affine-64-4-t"),
    "attention_decode": ((mx.float16, 7, 64, 64, 4, 2, 250), "2x7x256x64x64 float16 bits-4"),
    "attention_step": ((mx.float16, 1, 4, 2, 200, 64, 64), "1x4x2x256x64x64 float16"),
    "grid_sample": ((16, mx.float16, False, 2), "16x2 float16 any"),
    "attention_forward": (
        ((1, 4, 2, 32, 60, 64, 64), mx.float16, True),
        "1x4x2x32x64x64x64 float16 causal",
    ),
    "experts": (
        ((2, 9, 3, 40, 128), mx.float16, ("affine", 64, 4, "sum")),
        "2x9x3x40x128 float16 affine-64-4-sum",
    ),
    "gather_qmm": (
        ((60, 9, 40, 128), mx.float16, ("affine", 64, 4)),
        "64x9x40x128 float16 affine-64-4",
    ),
    "router": (
        ((2, 40), mx.float32, (Router(3, "sigmoid", scale=2.5), True, False)),
        "2x40 float32 top_k=3-score=sigmoid-scale=2.5-bias",
    ),
    "latent_attention": (((200, 2, 3, 64, 32), mx.float16, ()), "200x2x3x64x32 float16"),
}
PACKED = (*ASKED["attention_forward"][0], 8), "1x4x2x32x64x64x64 float16 causal-bits-8"
STEPS = [
    ((mx.bfloat16, 3, 6, 2, 600, 64, 128, 64, bits), f"3x6x2x1024x64x128 bfloat16 packed-64-{bits}")
    for bits in (8, 4)
]
STEPS += [((mx.float16, 2, 6, 2, 200, 64, 128, 0, 0, 5), "2x6x2x256x64x128 float16 tokens-5")]
EXPERTS = [
    (((rows, 9, 3, 40, 128), mx.float16, ("mxfp4", 32, 4, kind)), key)
    for rows, kind, key in (
        (1, "one", "1x9x3x40x128 float16 mxfp4-32-4-one"),
        (1, "pair", "1x9x3x40x128 float16 mxfp4-32-4-pair"),
        (5, "gate", "5x9x3x40x128 float16 mxfp4-32-4-gate"),
        (5, "each", "5x9x3x40x128 float16 mxfp4-32-4-each"),
    )
]


def test_every_family_is_here():
    assert set(ASKED) == set(RECORDS)


def agree(record, outputs, truth, factor=1):
    """Outputs are right, by the tolerances of a family times a factor."""
    found = record.numbers(outputs) if len(outputs) == len(truth) else outputs
    for y, right, tolerance in zip(found, truth, record.tolerances(len(truth)), strict=False):
        allowed = factor * tolerance * mx.abs(right).max()
        assert mx.abs(y.astype(mx.float32) - right).max() <= allowed


@pytest.mark.parametrize(
    "name, asked",
    [
        *ASKED.items(),
        ("attention_forward", PACKED),
        *(("attention_step", each) for each in STEPS),
        *(("experts", each) for each in EXPERTS),
    ],
)
def test_a_family_agrees_with_itself(name, asked, machine):
    """Its heuristic is legal and right, a key gives its record, and stock is a path."""
    key, text = asked
    record = RECORDS[name](*key)
    assert record.key == f"{name} {text}" and isinstance(record.heuristic("cuda"), record.configs)
    for device in ("metal", "cuda"):
        config = record.heuristic(device)
        # Tiles take the memory that they take there: on CUDA some need no padding.
        machine(device)
        assert record.why_not(config) is None
        assert record.completed(config) == config
        assert bool(record.near(config)) == bool(record.values.keys() & record.fields(config))
    machine("host")
    tuned = tune(record, budget_s=0, keep=False, evaluator=Counted)
    assert tuned.config == record.heuristic("metal") and not tuned.trials[0].problem
    inputs = record.inputs()
    truth = record.reference(inputs)
    with use_backend("host"):
        paths = record.paths(inputs)
        assert "stock" in paths
        for name, path in paths.items():
            # Of a step MLX gives its caches behind what is compared.
            of_step = name == "stock" and record.family == "attention_step"
            found = path(inputs)
            agree(record, found[:1] if of_step else found, truth, FACTOR)


@pytest.mark.parametrize(
    ("name", "system", "taken"),
    [
        ("qmm", "25.4.0", {"tensor", "codes"}),
        ("qmm", "25.2.0", {"tensor"}),
        ("gather_qmm", "25.4.0", {"tensor"}),
    ],
)
def test_tensor_operations_are_paths(name, system, taken, machine):
    """On a stand-in for an M5; packed codes where the system has them."""
    machine.apple(system=system)
    record = RECORDS[name](*ASKED[name][0])
    inputs = record.inputs()
    paths, truth = record.paths(inputs), record.reference(inputs)
    assert {"tensor", "codes"} & paths.keys() == taken
    for path in taken:
        agree(record, paths[path](inputs), truth, FACTOR)


@pytest.mark.parametrize("name", ["qmv", "grid_sample"])
def test_what_a_cpu_runs_can_be_searched_there(name):
    record = RECORDS[name](*ASKED[name][0])
    config = record.heuristic("host")
    near = record.near(config)
    assert isinstance(config, record.configs) and near
    inputs = record.inputs()
    truth = record.reference(inputs)
    with use_backend("host"):
        agree(record, record.bind(inputs, near[0])(inputs), truth)


def test_attention_of_keys_that_are_not_packed():
    record = RECORDS["attention_decode"](mx.bfloat16, 7, 64, 64, 0, 2, 200)
    tuned = tune(record, budget_s=0, keep=False, evaluator=Counted)
    assert not tuned.trials[0].problem


@pytest.mark.parametrize("kind", ["norm-3", "norm-gate", "residual"])
def test_products_with_what_stands_around_them(kind):
    mx.random.seed(7)
    record = RECORDS["qmv"](3, 48, 128, mx.bfloat16, FMT, kind)
    assert record.key.endswith(f"affine-64-4-t-{kind}")
    inputs, (config, *_) = record.inputs(), record.starts("metal")[1:]
    truth = record.reference(inputs)
    columns = {"norm-3": [16] * 3, "norm-gate": [24], "residual": [48]}[kind]
    assert [each.shape for each in truth] == [(3, n) for n in columns]
    with use_backend("host"):
        agree(record, record.bind(inputs, config)(inputs), truth)
    agree(record, record.paths(inputs)["stock"](inputs), truth, FACTOR)


def test_a_search_begins_with_both_kernels_where_it_is_not_known_which_is_faster():
    record = RECORDS["qmv"](1, 64, 128, mx.bfloat16, FMT)
    kernels = [config.kernel for config in record.starts("metal")[1:]]
    assert {*kernels} == {"qmv_matrix", "qmv"}
    assert [config.kernel for config in record.starts("cuda")] == ["qmv_matrix"]
    large = replace(record, n=1 << 15).starts("cuda")
    assert [config.kernel for config in large] == ["qmv_persistent", "qmv_matrix"]
    single = replace(record, dtype=mx.float32)
    assert len(single.starts("metal")[1:]) == 1


@pytest.mark.parametrize(
    ("name", "key", "operator"),
    [
        ("qmm", (37, 40, 128, mx.float32, FMT, True), "quantized_matmul"),
        (
            "attention_forward",
            ((1, 4, 2, 21, 60, 64, 64), mx.float32, True),
            "scaled_dot_product_attention",
        ),
    ],
)
def test_the_truth_is_float32_where_a_gpu_has_units_of_tf32(
    name, key, operator, machine, monkeypatch
):
    """Which MLX takes for many rows at once, and the stock operator may: that is timed."""
    machine("cuda")
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)  # which benchmarks set when imported
    place = reference if operator == "quantized_matmul" else mx.fast
    run, rows = getattr(place, operator), []

    def counted(x, *arguments, **options):
        rows.append(x.shape[-2])
        return run(x, *arguments, **options)

    record = RECORDS[name](*key)
    inputs = record.inputs()
    expected = record.stock(inputs)
    monkeypatch.setattr(place, operator, counted)
    truth = record.reference(inputs)
    assert rows and max(rows) <= 8
    agree(record, expected, truth)
    rows.clear()
    record.stock(inputs)
    assert max(rows) == inputs[0].shape[-2]
    rows.clear()
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    record.reference(inputs)
    assert max(rows) == inputs[0].shape[-2]
