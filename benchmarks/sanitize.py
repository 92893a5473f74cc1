"""Runs the kernels of this repository under every tool of NVIDIA's compute-sanitizer.

    python benchmarks/sanitize.py --csv

The cases are the checks of ``mlx-qlayers doctor``, results compared with stock operators. MLX
compiles a kernel anew in every process, which takes longer than to run it, so that each tool has
several processes with a part of the families each, all at once. Ends with status 1 if a tool or a
result complains.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import Table, arguments, output

from mlx_qlayers.commands.doctor_run import Outcome, outcomes
from mlx_qlayers.commands.examples import families
from mlx_qlayers.runtime import trace

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# A part of the name of every custom kernel of MLX's.
_OURS = "custom_kernel"


def main() -> int:
    """Start the tools, add up what they say; 1 if there is a complaint."""
    parser = arguments(__doc__)
    parser.add_argument("families", nargs="*", help="of kernels; all by default")
    parser.add_argument("--processes", type=int, default=4, help="for each tool")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = options.families or families()
    if options.part:
        start, step = map(int, options.part.split("/"))
        print(json.dumps(run_cases(chosen[start::step], options.backend)))
        return 0
    clean, table = True, Table()
    with output(options, "sanitize"), tempfile.TemporaryDirectory() as folder:
        for report in under_sanitizer(chosen, options.tools, options.processes, Path(folder)):
            clean = clean and report.clean
            table.add(**report.row, families=", ".join(chosen))
            for text in report.complaints:
                print(f"  {text}", flush=True)
    return int(not clean)


COUNTS = ("errors", "launches", "kernels", "cases", "wrong")


def run_cases(chosen: Sequence[str], backend: str) -> dict[str, Any]:
    """Run the checks of the families: launches by kernel, cases, and what was wrong."""
    with trace() as records:
        found = [*outcomes(chosen, backend, math.inf, one_process=True)]
    checked = [each for each in found if isinstance(each, Outcome)]
    wrong = [f"{each.row[0]}: {each.wrong}" for each in checked if each.wrong]
    launches = Counter(record.kernel for record in records)
    mx.synchronize()
    return {"cases": len(checked), "wrong": wrong, "launches": launches}


@dataclass(frozen=True)
class Report:
    """The report of one tool on all its processes."""

    tool: str  # its name
    cases: int
    kernels: int
    launches: int
    wrong: tuple[str, ...]  # results that are not what they should be, processes that broke off
    ours: tuple[str, ...]  # complaints about kernels of this repository
    others: int  # and about MLX's own

    @property
    def clean(self) -> bool:
        return not self.wrong and not self.ours and self.launches > 0

    @property
    def row(self) -> dict[str, Any]:
        """The counts, as a row of the table."""
        counts = (len(self.ours), self.launches, self.kernels, self.cases, len(self.wrong))
        row = {"tool": self.tool} | dict(zip(COUNTS, counts, strict=True))
        return row | {"reports about MLX": self.others}

    @property
    def complaints(self) -> list[str]:
        """The wrong results and the most frequent errors."""
        errors = (f"{n} x {text}" for text, n in Counter(self.ours).most_common(20))
        return [*self.wrong[:20], *errors]


def under_sanitizer(
    chosen: Sequence[str], tools: Sequence[str], processes: int, folder: Path
) -> Iterator[Report]:
    """Run all parts of the cases under all tools at once; each tool's report when it is done."""
    running = {
        (tool, i): _start(tool, f"{i}/{processes}", chosen, folder / f"{tool}-{i}.txt")
        for tool in tools
        for i in range(processes)
    }
    for tool in tools:
        outputs = [running[tool, i].communicate()[0] for i in range(processes)]
        logs = [_read(folder / f"{tool}-{i}.txt") for i in range(processes)]
        yield summary(tool, outputs, logs)


def _start(tool: str, part: str, chosen: Sequence[str], log: Path) -> subprocess.Popen[str]:
    # initcheck has to see MLX's own kernels fill the inputs; the others look at ours alone.
    only = [] if tool == "initcheck" else ["--kernel-name", f"kernel_substring={_OURS}"]
    command = ["compute-sanitizer", "--tool", tool, *only, "--print-limit", "10000"]
    command += ["--log-file", str(log), sys.executable, __file__, *chosen, "--part", part]
    environment = os.environ | {"MLX_USE_CUDA_GRAPHS": "0"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def summary(tool: str, outputs: Sequence[str], logs: Sequence[str]) -> Report:
    """Add up what the processes of one tool printed and what the tool logged about them."""
    wrong, launches, cases = [], Counter[str](), 0
    for printed in outputs:
        *rest, last = printed.strip().splitlines() or [""]
        try:
            part = json.loads(last)
        except ValueError:
            wrong.append("a process broke off: " + " | ".join([*rest[-5:], last])[-1000:])
            continue
        cases += part["cases"]
        wrong += part["wrong"]
        launches.update(part["launches"])
    ours, others = [], 0
    for log in logs:
        if "SUMMARY" not in log:
            wrong.append(f"no summary of {tool}: {log[-300:]!r}")
        for complaint in re.split(r"\n========= (?=\S)", log)[1:]:
            title = complaint.splitlines()[0]
            if re.search(r"SUMMARY|COMPUTE-SANITIZER|^Error: process", title):
                continue
            if tool != "initcheck" or _OURS in complaint:
                where = re.search(r"custom_kernel\w*", complaint)
                ours.append(f"{title.strip()} {where[0] if where else ''}".strip())
            else:
                others += 1
    return Report(tool, cases, len(launches), launches.total(), tuple(wrong), tuple(ours), others)


if __name__ == "__main__":
    sys.exit(main())
