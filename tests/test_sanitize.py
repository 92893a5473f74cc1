"""The sanitizer's driver: what it runs, and how it reads what the tools say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from sanitize import run_cases, summary
from sanitized import families

from mlx_qlayers.runtime.host import checks

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
FAULT = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at mlx::core::cu::custom_kernel_exp_forward_float32+0x80
=========     by thread (5,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at mlx::core::cu::copy_v+0x80
========= ERROR SUMMARY: 2 errors
"""
PRINTED = json.dumps({"cases": 2, "wrong": [], "launches": {"exp_forward": 3}})


def test_every_family_has_cases() -> None:
    assert {"exp", "grid_sample", "quantized_matmul", "conformance"} <= set(families())
    for cases in families().values():
        names = [name for name, _ in cases()]
        assert names and len(set(names)) == len(names)


def test_parts_run_each_case_once() -> None:
    with checks():
        parts = [run_cases(["exp"], "host", i, 3) for i in range(3)]
    assert sum(part["cases"] for part in parts) == len(list(families()["exp"]()))
    assert not any(part["wrong"] for part in parts)
    assert {"exp_forward", "exp_strided", "exp_gradient"} <= set().union(
        *(part["launches"] for part in parts)
    )


def test_the_conformance_set_is_compared_with_numpy() -> None:
    with checks():
        part = run_cases(["conformance"], "host", 0, 40)
    assert part["cases"] and part["launches"] and not part["wrong"]


def test_what_a_clean_tool_says() -> None:
    report = summary("memcheck", [f"note\n{PRINTED}\n", PRINTED], [CLEAN, CLEAN])
    assert report.clean
    assert (report.cases, report.kernels, report.launches) == (4, 1, 6)


def test_complaints_are_told_apart() -> None:
    assert len(summary("memcheck", [PRINTED], [FAULT]).ours) == 2
    report = summary("initcheck", [PRINTED], [FAULT])
    assert not report.clean
    assert (len(report.ours), report.others) == (1, 1)
    assert "custom_kernel_exp_forward" in str(report)


def test_a_process_that_breaks_off_is_not_clean() -> None:
    assert "broke off: Killed" in str(summary("memcheck", ["Killed"], [CLEAN]))
    assert not summary("memcheck", [PRINTED], [""]).clean
    wrong = json.dumps({"cases": 1, "wrong": ["exp: error 1"], "launches": {"exp_forward": 1}})
    assert not summary("memcheck", [wrong], [CLEAN]).clean
