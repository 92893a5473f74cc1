"""A step of decoding beyond the table: launches, rows of append buffers, graphs, batches."""

import mlx.core as mx
import pytest

from mlx_qlayers import explain, use_backend
from mlx_qlayers.metal.attention.step import Split
from mlx_qlayers.ops.attention_step import attention_step, packed_rows, why_not
from mlx_qlayers.runtime.backend import advance_epoch
from tests.devices import has_device
from tests.examples.heads import ATTENTION_STEP
from tests.gpus import GPUS
from tests.numerics import assert_same_sums

PATHS = ["reference", "host", *GPUS]
BATCH = {"batch": 3, "heads": (18, 2), "widths": (32, 256), "dims": 24, "masked": "all"}


def called(call, **changes):
    return attention_step(**call.arrays | call.options | changes)


@pytest.mark.parametrize("path", ["reference", "host", "checked", *GPUS])
@pytest.mark.parametrize(("teams", "splits", "dtype"), [(2, 4, "float16"), (4, 0, "bfloat16")])
def test_teams_of_a_threadgroup_and_the_last_one_that_adds_up(
    teams, splits, dtype, path, machine, monkeypatch
):
    """A GPU takes one launch, where others' writes are seen; the checked build sees none."""
    config, key = Split(1, 4, 1, 16, splits, teams=teams), (1, 6, 2, 300, 64, 64)
    has_device(monkeypatch, "host", orders_threadgroups=path == "host")
    if path != "reference":
        with use_backend("host" if path == "checked" else path):
            machine.measured("attention_step", getattr(mx, dtype), *key, config=config, kernel=1.0)
    changes = {"heads": (6, 2), "size": 300, "rows": 40, "filled": (0.93, 0.83), "dtype": dtype}
    call = ATTENTION_STEP.call(path, **changes)
    semaphores = call.options["semaphores"] = mx.zeros(8, mx.int32)
    for _ in range(2):
        _, launches = call.check(path)
        assert not semaphores.any().item()
    counts = {"reference": 0, "checked": 1 + (splits > 0)}
    assert len(launches) == counts.get(path, 1 if path in ("host", "cuda") else 1 + (splits > 0))
    advance_epoch()


@pytest.mark.parametrize("path", ["host", *GPUS])
@pytest.mark.parametrize(("size", "launches"), [(40, 1), (1030, 2)])
def test_launches(path, size, launches):
    assert len(ATTENTION_STEP.call(path, size=size).check(path)[1]) == launches


@pytest.mark.parametrize("packing", [(64, 4, 4), (64, 3, 2)])
@pytest.mark.parametrize("path", ["reference", "host"])
def test_rows_of_a_packed_append_buffer(path, packing):
    """The token's row is packed as by mx.quantize; nothing lies behind it."""
    call = ATTENTION_STEP.call(path, packing=packing, heads=(4, 2))
    explain(reset=True)
    with use_backend(path):
        _, *made = called(call)
    (decision,) = (d for d in explain() if d.op == "attention_step")
    assert path == "reference" or f"attention_step_packed, {packing[1]} bits" in decision.reason
    held = call.arrays["positions"][1].item()
    for new, name, bits in zip(made, "kv", packing[1:], strict=True):
        token = mx.quantize(call.arrays[name].reshape(1, 2, 1, 64), 64, bits)
        rows = call.options[f"{name}_append"][:, :, :held], packed_rows(token)
        assert mx.array_equal(new[:, :, : held + 1], mx.concatenate(rows, axis=2))
        assert not new[:, :, held + 1 :].any()


@pytest.mark.parametrize("path", ["host", *GPUS])
def test_gradients_are_the_references(path):
    call = ATTENTION_STEP.call("reference", heads=(3, 3), base=None, masked="heads")
    names = [name for name in call.arrays if name not in ("positions", "mask", "sinks")]

    def loss(*given):
        results = called(call, **dict(zip(names, given, strict=True)))
        return sum((y * (mx.arange(y.size).reshape(y.shape) % 5 - 1.75)).sum() for y in results)

    found = []
    for backend in (path, "reference"):
        with use_backend(backend):
            found.append(mx.grad(loss, [*range(8)])(*(call.arrays[name] for name in names)))
    for name, ours, theirs in zip(names, *found, strict=True):
        assert theirs.any() != (name == "freqs")
        assert_same_sums(ours, theirs)


@pytest.mark.parametrize("path", ["reference", *GPUS])
def test_one_graph_for_every_length(path):
    """Under ``mx.compile`` nothing depends on the number of keys."""
    call = ATTENTION_STEP.call("reference", heads=(4, 2))
    with use_backend(path):
        compiled = mx.compile(lambda positions: called(call, positions=positions)[0])
        explain(reset=True)
        for before, held in ((0, 0), (1, 0), (17, 3), (40, 16)):
            positions = mx.array([before, held] + [before + held] * 6, mx.int32)
            found = compiled(positions)
            with use_backend("reference"):
                assert_same_sums(found, called(call, positions=positions)[0])
    assert sum(d.calls for d in explain() if d.op == "attention_step" and d.path == path) <= 5


@pytest.mark.parametrize("path", ["host", *GPUS])
def test_a_batch_gives_each_member_what_a_batch_of_one_gives(path):
    call = ATTENTION_STEP.call(path, **BATCH, dtype="float16")
    before, held, *at = call.arrays["positions"].tolist()
    with use_backend(path):
        together = called(call)
        for i in range(3):
            one = {n: a[i : i + 1] for n, a in call.arrays.items() if a is not None}
            one["positions"] = mx.array([before, held, at[i], *[0] * 5], mx.int32)
            for a, b in zip(called(call, **one), together, strict=True):
                assert mx.array_equal(a[0], b[i])


@pytest.mark.parametrize("path", PATHS)
def test_says_where_it_is_not_worth_while(path):
    with use_backend(path):
        for shape in ((1, 4, 256, 68), (1, 4, 0, 64)):
            assert why_not(mx.float32, 1, shape, 64) == "no kernel for these shapes"
        for size in (256, 1 << 20):
            why = why_not(mx.float32, 1, (1, 4, size, 64), 64)
            assert why == ("asked for" if path == "reference" else None)
