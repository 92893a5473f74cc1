"""The sanitizer's driver: what it runs, and how it reads what the tools say."""

import json

from sanitize import run_cases, summary

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


def test_the_checks_of_doctor_are_run():
    with checks():
        part = run_cases(["exp"], "host")
    assert part["cases"] == 3 and not part["wrong"]
    assert {"exp_forward", "exp_strided", "exp_gradient"} <= part["launches"].keys()


def test_what_a_clean_tool_says():
    report = summary("memcheck", [f"note\n{PRINTED}\n", PRINTED], [CLEAN, CLEAN])
    assert report.clean
    assert (report.cases, report.kernels, report.launches) == (4, 1, 6)


def test_complaints_are_told_apart():
    assert len(summary("memcheck", [PRINTED], [FAULT]).ours) == 2
    report = summary("initcheck", [PRINTED], [FAULT])
    assert not report.clean
    assert (len(report.ours), report.others) == (1, 1)
    assert "custom_kernel_exp_forward" in report.complaints[0]
    assert report.row["errors"] == report.row["reports about MLX"] == 1


def test_a_process_that_breaks_off_is_not_clean():
    assert "broke off: Killed" in summary("memcheck", ["Killed"], [CLEAN]).complaints[0]
    assert not summary("memcheck", [PRINTED], [""]).clean
    wrong = json.dumps({"cases": 1, "wrong": ["exp: error 1"], "launches": {"exp_forward": 1}})
    assert not summary("memcheck", [wrong], [CLEAN]).clean
