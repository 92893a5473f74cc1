"""Compiles a folder of Metal texts with Apple's compiler and builds their pipelines (macOS only).

``make metal-sources`` writes the folder on any machine. For each text, in each language version
that the installed compiler knows, this prints the threads that a threadgroup may have
(``maxTotalThreadsPerThreadgroup``) and the bytes of threadgroup memory that the kernel declares.
It exits with 1 if a text does not compile, if it gives no pipeline, if a threadgroup that the Linux
tests launch has more threads than the pipeline admits, or if the compiler does not know a version
that it ``--needs``. The table is kept in the folder, as ``pipelines.json``.

Needs Xcode's Metal toolchain and ``pip install pyobjc-framework-Metal``.

Example:
    python tests/compile_metal_sources.py build/metal --needs 3.1 3.2
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

VERSIONS = ("3.1", "3.2", "4.0")


@dataclass(frozen=True)
class Pipeline:
    """The outcome of one text in one language version."""

    kernel: str  # the kernel's name
    function: str  # the function in the text
    version: str  # of the Metal language
    threads: int  # of the largest threadgroup that the tests launch
    max_threads: int = 0  # what the pipeline admits; 0 without a pipeline
    memory: int = 0  # static threadgroup memory in bytes
    error: str = ""  # what Apple's tools said, else ""

    @property
    def wrong(self) -> str:
        """Why this fails the check, or ""."""
        if self.error:
            return self.error
        if self.threads > self.max_threads:
            return f"launched with {self.threads} threads, at most {self.max_threads} are possible"
        return ""


def compiler(version: str) -> list[str]:
    """Apple's compiler with the options that MLX sets for its custom kernels."""
    return ["xcrun", "-sdk", "macosx", "metal", f"-std=metal{version}", "-fno-fast-math"]


def installed(version: str) -> bool:
    """Whether the compiler knows a language version."""
    command = [*compiler(version), "-x", "metal", "-fsyntax-only", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def knows(version: str, text: Path) -> bool:
    """Whether a version of the language has what a text includes: tensors came with 4.0."""
    return version >= "4.0" or "MetalPerformancePrimitives" not in text.read_text()


def pipeline_limits(device: Any, library: Path, function: str) -> tuple[int, int]:
    """The threads that a pipeline admits and its static memory; RuntimeError if there is none."""
    from Foundation import NSURL

    made, error = device.newLibraryWithURL_error_(NSURL.fileURLWithPath_(str(library)), None)
    if made is None:
        raise RuntimeError(str(error))
    state, error = device.newComputePipelineStateWithFunction_error_(
        made.newFunctionWithName_(function), None
    )
    if state is None:
        raise RuntimeError(str(error))
    return state.maxTotalThreadsPerThreadgroup(), state.staticThreadgroupMemoryLength()


def build(
    folder: Path,
    limits: Callable[[Path, str], tuple[int, int]],
    version: str,
    entry: dict[str, Any],
) -> Pipeline:
    """Compile one text of the manifest and build its pipeline."""
    result = partial(Pipeline, entry["kernel"], entry["function"], version, entry["threads"])
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch, "kernel.metallib")
        command = [*compiler(version), str(folder / entry["file"]), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return result(error=done.stderr.strip())
        try:
            return result(*limits(library, entry["function"]))
        except RuntimeError as error:
            return result(error=str(error))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile Metal texts with Apple's compiler.")
    parser.add_argument("folder", type=Path, help="what `make metal-sources` wrote")
    parser.add_argument("--needs", nargs="*", default=[], choices=VERSIONS, help="versions")
    given = parser.parse_args(arguments)
    folder, lacking = given.folder, set(given.needs)
    import Metal

    limits = partial(pipeline_limits, Metal.MTLCreateSystemDefaultDevice())
    entries = json.loads((folder / "manifest.json").read_text())
    results: list[Pipeline] = []
    for version in VERSIONS:
        if not installed(version):
            print(f"Metal {version}: not installed")
            continue
        lacking.discard(version)
        taken = [entry for entry in entries if knows(version, folder / entry["file"])]
        with ThreadPoolExecutor() as pool:
            results += pool.map(partial(build, folder, limits, version), taken)
    for each in results:
        print(f"{each.version}  {each.max_threads:5}  {each.memory:6}  {each.function[:120]}")
    table = json.dumps([asdict(each) for each in results], indent=1)
    (folder / "pipelines.json").write_text(table + "\n")
    wrong = [each for each in results if each.wrong]
    for each in wrong:
        print(f"\nMetal {each.version}, {each.function}: {each.wrong}", file=sys.stderr)
    print(f"{len(results)} pipelines, {len(wrong)} wrong")
    return 1 if wrong or lacking or not results else 0


if __name__ == "__main__":
    sys.exit(main())
