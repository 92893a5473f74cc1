"""Runs the conformance set on one backend, and measures what the CUDA shim makes of it.

    python benchmarks/conformance.py --backend cuda --out benchmarks/results --speed

Prints one line a kernel, writes ``conformance_<backend>.json`` to the folder, and ends with status
1 if a result is wrong. The outputs that must be exact are hashed: the files of two backends agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runtime.conformance import Case, cases  # noqa: E402

from mlx_qlayers.runtime import Kernel, use_backend  # noqa: E402

SPEED = Path(__file__).parent / "conformance.metal"


def main() -> int:
    """Run, print, write; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="cuda", choices=("metal", "cuda", "host"))
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--speed", action="store_true", help="measure loads and matrix products")
    options = parser.parse_args()
    machine = describe(options.backend)
    print(*(f"{key}: {value}" for key, value in machine.items()), sep="\n")
    chosen = [case for case in cases() if options.only in case.name]
    results = [compared(case, options.backend) for case in chosen]
    parts = [part for result in results for part in result["parts"]]
    wrong = [part for part in parts if not part["passed"]]
    print(f"{len(results)} launches, {len(parts)} results, {len(wrong)} wrong")
    speeds = speed(options.backend) if options.speed else {}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine, "wrong": len(wrong), "speed": speeds, "cases": results}
        file = options.out / f"conformance_{options.backend}.json"
        file.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(wrong) or any("error" in result for result in results))


def describe(backend: str) -> dict[str, str]:
    """The device, its driver and the versions of what runs on it."""
    found = {
        "backend": backend,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in ("mlx", "mlx-cuda-13", "mlx-cuda-12", "nvidia-cuda-nvrtc", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if backend == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = subprocess.check_output(query, text=True).splitlines()[0].split(", ")
        found |= {"device": name, "driver": driver}
    else:
        found["device"] = platform.processor() or platform.machine()
    return found


def compared(case: Case, backend: str) -> dict[str, Any]:
    """Run one case; a backend's exception is a result too."""
    started = time.perf_counter()
    try:
        outputs = case.run(backend)
    except Exception as error:
        print(f"{case.name}: ERROR {str(error)[:2000]}")
        return {"name": case.name, "error": str(error), "parts": []}
    seconds = time.perf_counter() - started
    parts = case.compare(outputs)
    exact = [part for part in parts if part.allowed == 0]
    digest = hashlib.sha256()
    if len(exact) == len(parts):
        for out in outputs:
            # Zeros of either sign are equal.
            digest.update((out + np.zeros_like(out)).tobytes())
    good = sum(part.passed for part in parts)
    print(f"{case.name}: {good} of {len(parts)} right, {seconds:.2f} s")
    for part in parts:
        if not part.passed:
            print(f"  {part}")
    return {
        "name": case.name,
        "seconds": round(seconds, 3),
        "sha256": digest.hexdigest() if len(exact) == len(parts) else None,
        "parts": [
            {"name": p.name, "ulp": p.distance, "allowed": p.allowed, "passed": bool(p.passed)}
            for p in parts
        ],
    }


def speed(backend: str) -> dict[str, float]:
    """GB/s of wide loads and TFLOP/s of matrix products, best of what is launched back to back."""
    found = {}
    with use_backend(backend):
        found["read GB/s"] = read_speed()
        for dtype in (mx.bfloat16, mx.float16, mx.float32):
            for name in ("fragment_speed", "matrix_speed"):
                label = (
                    f"{name.removesuffix('_speed')} {str(dtype).removeprefix('mlx.core.')} TFLOP/s"
                )
                found[label] = product_speed(name, dtype)
    for name, value in found.items():
        print(f"{name}: {value:.4g}")
    return found


def seconds_of(launch: Callable[[], list[mx.array]], times: int = 10) -> float:
    """The median time of one launch, several queued at once."""
    mx.eval(launch())
    samples = []
    for _ in range(5):
        started = time.perf_counter()
        mx.eval([launch() for _ in range(times)])
        samples.append((time.perf_counter() - started) / times)
    return statistics.median(samples)


def read_speed() -> float:
    steps, threads = 64, 2**20
    x = mx.zeros((steps * threads * 4,), mx.uint32)
    mx.eval(x)
    kernel = Kernel("read_speed", SPEED, ("x", "steps"), ("out",), large=True)
    seconds = seconds_of(
        lambda: kernel(
            [x, mx.array(steps)],
            grid=(threads, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(8,)],
        )
    )
    return x.nbytes / seconds / 1e9


def product_speed(name: str, dtype: mx.Dtype) -> float:
    steps, threads = 2000, 132 * 8 * 256
    x = mx.random.normal((32 * 16,)).astype(dtype)
    kernel = Kernel(name, SPEED, ("x", "steps"), ("out",), template=("T",))
    seconds = seconds_of(
        lambda: kernel(
            [x, mx.array(steps)],
            template={"T": dtype},
            grid=(threads, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(threads,)],
        ),
        times=3,
    )
    depth = 16 * 8 * 16 if name == "fragment_speed" else 8 * 8 * 8
    return 2.0 * depth * 8 * steps * threads / 32 / seconds / 1e12


if __name__ == "__main__":
    sys.exit(main())
