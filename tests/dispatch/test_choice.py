"""Which path an operation takes, and the reason that is given."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_qlayers
from mlx_qlayers.dispatch import Choice, choose
from mlx_qlayers.dispatch.choice import choose_measured
from mlx_qlayers.measurements.thresholds import Measured
from mlx_qlayers.runtime.backend import BackendError, use_backend

PACKAGE = Path(mlx_qlayers.__file__).parent


def test_paths_and_reasons(machine):
    machine("metal")
    assert choose("a") == Choice("a", "metal", "auto")
    assert choose("b", False) == Choice("b", "reference", "no metal kernel for these arguments")
    reason = "K is not a multiple of 64"
    assert choose("c", reason=reason) == Choice("c", "reference", reason)
    with use_backend("reference"):
        assert choose("d") == Choice("d", "reference", "asked for")
    with use_backend("metal"):
        # Asked for: what auto would avoid is done.
        assert choose("e", reason=reason) == Choice("e", "metal", "asked for")
        with pytest.raises(BackendError, match="f has no metal kernel for these arguments"):
            choose("f", False)
    slower = Measured("stock is faster")
    assert choose("g", reason=slower) == Choice("g", "reference", "stock is faster", "measured")
    expected = Choice("g", "metal", "auto, by qmv", "measured")
    assert choose("g", reason=Measured(""), by="qmv") == expected
    with use_backend("metal"):
        nothing = Choice("h", "reference", "x is empty")
        assert choose("h", empty="x is empty", reason=slower) == nothing


def test_the_reason_names_a_missing_compiler(machine):
    machine()
    assert choose("a").reason == "no GPU, and no host backend: no host here"
    assert choose("b", False).reason == "no reference kernel for these arguments"
    assert choose("a").path == choose("b", False).path == "reference"


@pytest.mark.parametrize(
    ("gain", "expected", "reason"),
    [
        (None, "reference", "the kernel was not measured on a CPU"),
        (0.5, "reference", "on a CPU the kernel has 0.5 times the speed of MLX's operators"),
        (36.1, "host", "auto: 36 times the speed of MLX's operators on a CPU"),
    ],
)
def test_auto_runs_on_a_cpu_only_what_is_faster_there(machine, gain, expected, reason):
    machine("host")
    evidence = "measured" if gain else "rule"
    assert choose("op", host_gain=gain) == Choice("op", expected, reason, evidence)
    with use_backend("host"):
        assert choose("op", host_gain=gain).path == "host"
    machine("metal", "host")
    assert choose("op", host_gain=gain).path == "metal"


def test_on_metal_what_nobody_measured_is_left(machine):
    machine("metal")
    assert choose_measured("op", True, "latent_attention", (256, 1, 4, 64, 32), mx.float16, ()) == (
        Choice("op", "reference", "the kernel was not measured on an Apple GPU")
    )


def test_a_device_is_asked_and_not_a_backends_name():
    """Differences between backends are fields of Device."""
    files = [*PACKAGE.rglob("*.py")]
    asks = re.compile(r'(==|!=|\) in|not in) \(?"(metal|cuda|host)"')
    assert len(files) > 250
    assert not [path.name for path in files if asks.search(path.read_text())]
