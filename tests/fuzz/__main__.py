"""Runs every fuzz target for a share of the time, two at once, each in a process of its own.

    python -m tests.fuzz MINUTES [WORD ...]

A process that dies or hangs is a finding like any other, and the target goes on in a new one.
Prints for each target the examples and the findings; what was found is in ``build/fuzz``. With
words, only targets are run whose names have one of them.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.target import HUNG
from tests.fuzz.test_operations import TARGETS

HERE = Path(__file__).parent
OUT = Path("build/fuzz")


@dataclass
class Result:
    """The outcome of one target."""

    name: str
    examples: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    processes: int = 0
    seconds: float = 0.0


def targets() -> list[str]:
    """The node ids of all targets."""
    folder = HERE.relative_to(Path.cwd())
    return [
        f"{path}::{name}"
        for path in sorted(folder.glob("*.py"))
        for name in re.findall(r"^@fuzz\(.*?^def (test_\w+)", path.read_text(), re.M | re.S)
    ] + [f"{folder}/test_operations.py::{name}" for name in TARGETS]


def run(target: str, seconds: float) -> Result:
    """Fuzz a target for so long, in as many processes as it takes."""
    result = Result(target.partition("::")[2].removeprefix("test_"))
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 1 and result.processes < 200:
        result.processes += 1
        _one(target, left, result)
    result.seconds = seconds
    print(f"{result.name}: {result.examples} examples, {len(result.findings)} findings", flush=True)
    return result


def _one(target: str, seconds: float, result: Result) -> None:
    state, log = OUT / f"{result.name}.state", OUT / f"{result.name}.log"
    state.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "FUZZ_SECONDS": str(seconds),
        "FUZZ_STATE": str(state.absolute()),
        "PYTHONFAULTHANDLER": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--timeout", "0", "-s", "--tb", "native", target]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        code = process.wait()
    with contextlib.suppress(ProcessLookupError):  # servers that it may have left behind
        os.killpg(process.pid, signal.SIGKILL)
    count, case = _read(state)
    result.examples += count
    if code == 0:
        return
    text = log.read_text(errors="replace")
    what = _finding(code, text, case)
    key = what[:40] if code < 0 or HUNG in text else what.partition(": ")[0]
    if key not in result.findings:
        result.findings[key] = what
        kept = OUT / f"{result.name}.finding-{len(result.findings)}.log"
        kept.write_text(f"{what}\n\nlast case: {case}\n\n{text}")
        print(f"FINDING in {result.name}: {what[:2000]}\n  see {kept}", flush=True)


def _read(state: Path) -> tuple[int, str]:
    try:
        count, _, case = state.read_bytes().partition(b"\0")[0].partition(b"\n")
        return int(count), case.decode().strip()
    except (OSError, ValueError):
        return 0, ""


def _finding(code: int, log: str, case: str) -> str:
    if code < 0:
        return f"{signal.Signals(-code).name} in {case}"
    if HUNG in log:
        return f"hangs in {case}"
    told = re.search(r"^FINDING (.*\n  case: .*)$", log, re.M)
    return told[1] if told else f"exit code {code}: {log[-300:]}"


def main(minutes: float, words: list[str]) -> int:
    """Run all targets; 1 if anything was found."""
    OUT.mkdir(parents=True, exist_ok=True)
    chosen = [t for t in targets() if not words or any(word in t for word in words)]
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    share = minutes * 60 * workers / len(chosen)
    print(f"{len(chosen)} targets, {share:.0f} s each, {workers} at once", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda target: run(target, share), chosen))
    print(f"\n{'target':32}{'minutes':>8}{'examples':>10}{'processes':>10}{'findings':>9}")
    for each in results:
        print(
            f"{each.name:32}{each.seconds / 60:8.1f}{each.examples:10}{each.processes:10}"
            f"{len(each.findings):9}"
        )
    print(f"{'all':32}{share * len(chosen) / 60:8.1f}{sum(r.examples for r in results):10}")
    return int(any(each.findings for each in results))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
