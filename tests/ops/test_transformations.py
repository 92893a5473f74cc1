"""The table of the page of operations: which derivatives and transformations each has."""

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_qlayers import use_backend
from mlx_qlayers.runtime import trace
from tests.examples import CALLS
from tests.fuzz.test_transforms import works

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
COLUMNS = "compile of vjp", "checkpoint", "vmap"
# The first sound call of each public operation but that which works in place.
FIRST = {call.function.__name__: call for call in reversed(CALLS.values())}
NAMES = sorted(name for name in FIRST if not name.startswith(("_", "subtract")))


def row(name: str) -> str:
    """Of the operation's first sound call, on the host backend."""
    call = FIRST[name]
    case = SimpleNamespace(seed=0, name=call.name, backend="host", transformation="vjp")
    with use_backend("host"), trace() as forward:
        mx.eval(call.results(*call.arrays))
    with trace() as both:
        gradient = works(case)
    by = "kernels" if len(both) > len(forward) else "operators"
    cells = [f"`{name}`", by if gradient else "none"]
    for column in COLUMNS:
        case.transformation, case.backend = column, "auto"
        cells.append("yes" if gradient | (column == "vmap") and works(case) else "refused")
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_each_has(name):
    """Whatever is not refused gives the right numbers."""
    found = row(name)
    assert found in PAGE.read_text().splitlines(), found
