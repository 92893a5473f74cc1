"""Writes into docs/models.md how the architectures of mlx-lm decode once they are converted.

    make architectures

A row follows from the report of converting a small model; ``tests/test_architectures.py`` compares.
"""

import re
from pathlib import Path

import mlx.nn as nn
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY, build
from decoding import logits
from step_models import as_graphs, left

from mlx_qlayers import convert_model, explain, use_backend
from mlx_qlayers.conversion.report import FUSED, ConversionReport
from mlx_qlayers.decode.engine import stopped

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- end -->"
# Of which the tests have no model, and why.
WITHOUT = {
    "bitnet": "Metal only",
    "muse_spark": "Metal only",
    "olmo": "needs a package that mlx-lm does not install",
    "phi3small": "its vocabulary is large by construction",
    "prism_hadamard_qwen35": "one checkpoint's own format",
}
_AT_FIRST = "left at the first step: "
_ESCAPED = str.maketrans({"|": r"\|", "_": r"\_"})


def row(name: str, report: ConversionReport, stopped: str | None = None) -> str:
    """A line of the table, but for its last cell."""
    (step,) = report.fusions or (None,)
    if stopped:
        how = _AT_FIRST + stopped
    elif step is None:
        how = "left: its `__call__` takes no tokens and cache"
    else:
        how = step.reason if step.action == FUSED else "left: " + step.reason
    return f"| {name} | {how.translate(_ESCAPED)} |"


def agrees(name: str, report: ConversionReport, page: str) -> bool:
    """Whether the page has the row, or one that says what only a step finds."""
    return "\n" + row(name, report) + " " in page or f"| {_AT_FIRST}" in next(
        line for line in page.splitlines() if line.startswith(f"| {name} |")
    )


def alike(model: nn.Module) -> str:
    """The last cell: whether the model is batch-invariant on a CPU, or what refuses it says."""
    try:
        with use_backend("host"):
            convert_model(model, batch_invariant=True, calibrate=False)
    except ValueError as error:
        said = str(error).removeprefix("the model is not batch-invariant: ")
        return re.sub("(differs|fails).*", r"\1", said)
    return "yes"


def main() -> None:
    """Run from the command line."""
    lines = ["| architecture | a token of each sequence | batch-invariant |", "|---|---|---|"]
    for name in sorted(ARCHITECTURES | dict.fromkeys(WITHOUT)):
        if name in WITHOUT:
            lines.append(f"| {name} | not tested: {WITHOUT[name]} | |")
            continue
        model = build(name, ARCHITECTURES[name])
        report = convert_model(model, verify=False)
        is_graph = any(f.action == FUSED for f in report.fusions)
        first = row(name, report, _stopped(model) if is_graph else None)
        lines.append(f"{first} {alike(build(name, ARCHITECTURES[name]))} |")
        print(lines[-1], flush=True)
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def _stopped(model: nn.Module) -> str | None:
    """The reason that stops the first step, where it begins as a graph."""
    explain(reset=True)
    with as_graphs():
        logits([model], "own", 1, VOCABULARY)
    return stopped(model) if left(model) > 2 else None


if __name__ == "__main__":
    main()
