"""On an Apple GPU that is not there: nothing runs by default without a proof, whatever fails.

Each test runs two processes with one cache folder. In every kernel, and on every path that models
take, the same faults are tried: all kernels at once where each has a call of its own, so that a
process serves for all of them, and one family for each path. Kernels are the host build's, which
other tests compile too.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import apple_gpu
import pytest

from mlx_qlayers.ops.tensor_choice import CODES, MEMORY, TENSOR
from mlx_qlayers.runtime.cache_folder import own_folder

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
PATHS = ("decoding", "training", "quantizing", "serving")
# The name of such a fault in a warning.
SAID = {
    "does not compile": "Unable to build metal library",
    "NaN": "NaN in output",
    "wrong": "in output",
    "raises": "Command buffer execution failed",
    "hangs": "no result within",
    apple_gpu.IN_VIEWS: "for arrays that begin inside of their buffers",
}


# Kernels that are reached where those before them are right.
OF_GRADIENTS = (
    *("exp_gradient", "attention_backward", "deformable_gradient", "quantized_gradients"),
    *("grid_sample_gradient", "grid_sample_list", "grid_sample_find", "grid_sample_spread"),
    *("solve_lower", "subtract_product", "gather_qmm_tiles", "attention_combine", "gated_rows"),
    "low_rank_outer",
)
# Kernels of an M5 that are launched before others in one operation, and those behind others: the
# gradient of an additive mask is that where the keys' is right.
FIRST = "group_sums|int8_rows|gather_qmm_list|attention_tensor_queries"
LAST = "attention_tensor_keys(?!.*MASK=2)|attention_tensor_mask"
# Set, rows of the page are written and not compared.
WRITES = bool(os.environ.get("MLX_QLAYERS_WRITE_FAULTS"))


class Run(NamedTuple):
    """The outcome of a process."""

    results: dict[str, str]  # by scenario why they were not as stock's, or nothing
    warned: set[tuple[str, str]]  # kernels, and what was said to be wrong
    launches: list[tuple[str, str]]  # of the process itself, kernels and whether they were proven
    tried: set[str]  # kernels that the other process launched


def run(
    folder: Path, *names: str, faults: Mapping[str, str] | None = None, fastest: str = ""
) -> Run:
    """Run scenarios in a process of their own, on that Mac; of tensors these paths are fastest."""
    log = folder / "launches"
    log.unlink(missing_ok=True)
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    if not (cache / "host").exists():
        (cache / "host").symlink_to(own_folder("host"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (apple_gpu.FOLDER, ROOT))),
        "MLX_QLAYERS_CACHE_DIR": str(cache),
        "MLX_QLAYERS_CALIBRATE": "0",
        apple_gpu.FAULTS: json.dumps(faults or {}),
        apple_gpu.LAUNCHES: str(log),
        apple_gpu.HANGS: str(folder / "hangs"),
        "MLX_QLAYERS_PROOF_SECONDS": "0.1",
        apple_gpu.FASTEST: fastest,
    }
    command = [sys.executable, str(apple_gpu.FOLDER / "scenarios.py"), *names]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    warnings = re.findall(r"warning: kernel (\S+) is left for [^:]*: (.*)", err)
    assert len({*warnings}) == len(warnings)
    launched = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    own = str(process.pid)
    return Run(
        dict(map(json.loads, out.splitlines())),
        {*warnings},
        [(name, verdict) for pid, name, verdict in launched if pid == own],
        {name for pid, name, _ in launched if pid != own},
    )


def on_page(kind: str, tried: set[str]) -> None:
    """Hold a row of the page against kernels that had a fault."""
    families = sorted({re.sub(r"_[0-9a-f]{6}$|_\d+[a-z]*$", "", name) for name in tried})
    row = f"| {kind} | {len(families)} | {', '.join(families)} | stock's numbers, one warning |"
    page = PAGE.read_text()
    if WRITES:
        lines = [row if x.startswith(f"| {kind} |") else x for x in page.splitlines()]
        lines[-1:] = [*[row] * (row not in lines), lines[-1]]
        PAGE.write_text("\n".join([*lines, ""]))
    else:
        assert row in page, row


def named(found: Run, tried: set[str]) -> None:
    """Each of these is in a warning."""
    words = set(re.findall(r"\w+", " ".join(" ".join(each) for each in found.warned)))
    assert tried <= words


def as_stock(found: Run) -> None:
    assert found.results
    assert {what: differs for what, differs in found.results.items() if differs} == {}


@pytest.mark.slow
def test_no_default_launch_without_a_stored_proof(tmp_path, record_property):
    found = run(tmp_path, "operations", *PATHS)
    as_stock(found)
    unproven = [name for name, verdict in found.launches if verdict != "proven"]
    title = "table: Launches on a simulated Apple GPU: all, without a proof"
    record_property(title, ["by default", len(found.launches), len(unproven)])
    assert found.warned == set()
    assert len(found.launches) > 1000
    assert unproven == []
    again = run(tmp_path, "training")  # in the next process nothing is proven once more
    as_stock(again)
    assert again.launches
    assert again.tried == set()


def kinds(*here):
    """All kinds of faults, of which these are in `make test`."""
    marks = {kind: [] if kind in here else [pytest.mark.faults] for kind in apple_gpu.KINDS}
    return pytest.mark.parametrize("kind", [pytest.param(k, marks=m) for k, m in marks.items()])


@pytest.mark.slow
@kinds("NaN")
def test_a_fault_in_every_kernel(kind, tmp_path):
    """Each is tried once, in the other process; then stock's operators give the numbers."""
    first = run(tmp_path, "operations", faults={"": kind})
    as_stock(first)
    assert first.launches == []
    named(first, first.tried)
    assert all(SAID[kind] in why for _, why in first.warned)
    second = run(tmp_path, "operations", faults={"": kind})
    as_stock(second)
    assert (second.launches, second.tried) == ([], set())
    assert second.warned == first.warned
    on_page(kind, first.tried)


@pytest.mark.slow
@kinds("wrong")
def test_a_fault_in_every_kernel_of_gradients(kind, tmp_path):
    """And in those that others launch first: stock's operators give the gradients."""
    found = run(tmp_path, "operations", faults=dict.fromkeys(OF_GRADIENTS, kind))
    as_stock(found)
    assert not any(name.startswith(OF_GRADIENTS) for name, _ in found.launches)
    assert {verdict for _, verdict in found.launches} == {"proven"}
    tried = {name for name in found.tried if name.startswith(OF_GRADIENTS)}
    named(found, tried)
    on_page(f"{kind}, gradients", tried)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fastest", "failing", "kind", "instead"),
    [
        (
            "tensor codes",
            ("attention_tensor .*HANDED=True", "qmm_codes"),
            apple_gpu.IN_VIEWS,
            [MEMORY, TENSOR],
        ),
        pytest.param(
            *("tensor_memory tensor", ("attention_tensor .*HANDED=False", "qmm_tensor")),
            *("does not compile", [TENSOR, CODES]),
            marks=pytest.mark.faults,
        ),
    ],
)
def test_other_tensor_operations_take_the_place_of_those_that_fail(
    fastest, failing, kind, instead, tmp_path
):
    """On an M5: the second way is proven too, and the first one is not tried again."""
    options = {"faults": dict.fromkeys(failing, kind), "fastest": fastest}
    first = run(tmp_path, "tensors", **options)
    as_stock(first)
    for told, other in zip(first.results, instead, strict=True):
        assert f"by {other}; not" in told
    assert {verdict for _, verdict in first.launches} == {"proven"}
    assert len(first.warned) == 2
    assert all(SAID[kind] in why for _, why in first.warned)
    second = run(tmp_path, "tensors", **options)
    assert second == first._replace(tried=set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failing"),
    [("", f"(?!{FIRST}|{LAST})"), (", others", FIRST), (", behind others", LAST)],
    ids=["most", "others", "last"],
)
@kinds("wrong")
def test_a_fault_in_every_kernel_of_an_m5(kind, name, failing, tmp_path):
    """Of most, or of those that others go with. QR comes here, where no other call needs its last
    kernels."""
    options = {"faults": {failing: kind}, "fastest": "tensor codes"}
    first = run(tmp_path, "tensors", "other_tensors", **options)
    as_stock(first)
    assert {verdict for _, verdict in first.launches} <= {"proven"}
    assert not any(re.match(failing, kernel) for kernel, _ in first.launches)
    tried = {kernel for kernel in first.tried if re.match(failing, kernel)}
    named(first, tried)
    on_page(f"{kind}, on an M5{name}", tried)


@pytest.mark.slow
@pytest.mark.faults
def test_stock_takes_the_place_where_all_tensor_operations_fail(tmp_path):
    """Gradients go through memory where they fail with scores that are handed over."""
    failing = "attention_tensor_.*HANDED=True", "qmm_"
    found = run(tmp_path, "tensors", faults=dict.fromkeys(failing, "NaN"), fastest="tensor codes")
    as_stock(found)
    launched = {name for name, _ in found.launches}
    assert launched == {"attention_tensor", "attention_tensor_queries", "attention_tensor_keys"}


@pytest.mark.slow
@kinds("raises")
def test_a_fault_on_every_path(kind, tmp_path):
    """Of a few kernels that these paths take, beside others that are right."""
    faults = dict.fromkeys(("attention_step", "gptq", "attention_backward", "qmv_1c47cf"), kind)
    first = run(tmp_path, *PATHS, faults=faults)
    as_stock(first)
    assert {verdict for _, verdict in first.launches} == {"proven"}
    assert not any(name.startswith((*faults,)) for name, _ in first.launches)
    reached = {start for start in faults if any(each.startswith(start) for each in first.tried)}
    assert reached == {*faults}
    assert len({name for name, _ in first.warned}) == len(first.warned)
