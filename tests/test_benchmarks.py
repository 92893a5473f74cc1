"""The benchmarks' shared tools, and one whole run of them on a small model."""

import csv
import runpy
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import simulate_distributed
from common import Table, arguments, facts, output
from harness import Task, case, either, tasks
from stored import Results

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_rows_are_in_the_file_as_soon_as_they_are_known(tmp_path):
    args = arguments("A benchmark.").parse_args(["--csv", str(tmp_path / "out.csv")])

    def names() -> list[str]:
        lines = [line for line in (tmp_path / "out.csv").open() if not line.startswith("#")]
        return [row["name"] for row in csv.DictReader(lines)]

    with pytest.raises(KeyboardInterrupt), output(args, "any"):
        first, second = Table(), Table()
        first.add(name="a")
        assert names() == ["a"]
        second.add(name="b", ms=1.0)
        first.add(name="c")
        assert names() == ["a", "c", "b"]
        raise KeyboardInterrupt
    first.add(name="d")
    assert names() == ["a", "c", "b"]


def double(x: mx.array) -> mx.array:
    return 2 * x


def compare(ours: Callable[[mx.array], mx.array], table: Table, **options: Any) -> None:
    """A stock function and one of ours, with the gradients of x."""
    inputs = [mx.array([1.0, 4.0]), mx.array([1.0, 3.0])]

    def way(name: str, function: Callable[[mx.array], mx.array]) -> Callable[[Any], Any]:
        return lambda task: {name: either(task, function, inputs)}

    shapes = tasks(["two"])
    case(way("stock", double), way("ours", ours), shapes, table=table, repeats=2, **options)


def test_a_case_is_a_row_of_each_contender_or_one_of_all():
    long, wide = Table(), Table()
    compare(lambda x: x + x, long, tolerance=lambda task: 0.0)
    assert [(row["task"], row["path"]) for row in long.rows] == [
        (f"two, {what}", path)
        for what in ("forward", "with gradients")
        for path in ("stock", "ours")
    ]
    assert all(row["ms"].median > 0 and row["ms"].count == 2 for row in long.rows)

    def row(task: Task) -> dict[str, Any]:
        return {"gradients": task.gradients}

    compare(double, wide, tolerance=lambda task: 0.0, row=row, unit="us", calls=lambda task: 4)
    assert [row["gradients"] for row in wide.rows] == [False, True]
    for row in wide.rows:
        assert row["ratio"] == pytest.approx(row["stock"].median / row["ours"].median)
        assert row["error"] == 0


@pytest.mark.parametrize("share, fails", [(0.0, True), (0.5, False)])
def test_a_case_that_is_wrong_is_not_timed(share, fails):
    """The gradient is wrong, in one of two numbers, and the value as it should be."""
    table, weights = Table(), mx.array([0.0, 0.3])

    def wrong(x: mx.array) -> mx.array:
        return 2 * x + weights * (x - mx.stop_gradient(x))

    def run() -> None:
        compare(wrong, table, tolerance=lambda task: 0.01, wrong=share)

    if fails:
        with pytest.raises(AssertionError, match="with gradients: ours: 50"):
            run()
    else:
        run()
    assert len(table.rows) == (2 if fails else 4)


@pytest.fixture
def run(monkeypatch, capsys):
    """The output of a benchmark that is run as a script."""

    def run(benchmark: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / benchmark), *options])
        facts.cache_clear()  # among which is the command
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capsys.readouterr().out

    yield run
    facts.cache_clear()


def test_generation_benchmark(tiny_model, tmp_path, run):
    options = ["--prompt-tokens", "20", "--tokens", "8", "--repeats", "2", "--verify-tokens", "8"]
    files = ["--csv", str(tmp_path / "generate.csv")]
    printed = run("bench_generate.py", "--model", str(tiny_model), *options, *files)
    assert "verified: in float32" in printed and "mlx-lm" in printed
    found = Results.read(tmp_path / "generate.csv")
    assert found.facts["command"].startswith("python benchmarks/bench_generate.py --model")
    assert not found.stale
    assert [row["layers"] for row in found.rows][:2] == ["stock mlx-lm", "converted (auto)"]
    assert all(row["decode tok/s"] > 0 and row["prefill tok/s count"] == 2 for row in found.rows)


def test_simulated_ranks_take_the_time_that_was_measured():
    found = simulate_distributed.check(BENCHMARKS / "results" / "distributed_cuda.csv")
    assert {*found} == {"decode, batch 1", "decode, batch 16"}
    assert all(0.8 < ratio < 1.25 for ratio in found.values()), found


def test_decoding_benchmark(tmp_path, run):
    options = ["--tiny", *("--tokens", "4", "--prompt-tokens", "8", "--repeats", "1")]
    options += ["--prefill", "20", "--csv", str(tmp_path / "decode.csv")]
    assert "verified 8 x 11 tokens" in run("bench_decode.py", *options)
    rows = [row for row in Results.read(tmp_path / "decode.csv").rows if row["what"]]
    names = ["stock", "converted, not fused", "converted"]
    whats = [*(f"decode, batch {n}" for n in (1, 4, 8)), "prefill 20", "prefill 20, new lengths"]
    assert {(row["layers"], row["what"]) for row in rows} == {*product(names, whats)}
    assert len(rows) == len(names) * len(whats)
