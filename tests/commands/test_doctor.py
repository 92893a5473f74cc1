"""The command doctor: it runs every kernel there is, and says what is wrong; and info."""

import json
import re

import pytest

from mlx_qlayers.cli import main
from mlx_qlayers.commands import examples
from mlx_qlayers.runtime import trace
from mlx_qlayers.runtime.source import METAL, OPERATIONS
from tests import apple_gpu
from tests.gpus import HERE, on_gpus

# Where threads run one by one.
ON_CPUS = {
    "attention_serial",
    "qmv_serial",
    "quantized_gradients_groups",
    "qvm",
    "grid_sample_gradient_x_bands",
}
# On Apple GPUs the depth of a product is not divided without tuning, and stock operators take rows.
ON_CUDA = {
    "qmm_sum",
    "qmm_skinny_sum",
    "dequantize_rows",
    "qmv_persistent",
    "attention_forward_ahead",
} | {f"attention_backward_{name}" for name in ("once", "rows", "statistics")}
TENSORS = {"qmm_tensor", "group_sums", "qmm_codes", "gather_qmm_tensor", "attention_tensor"} | {
    f"attention_tensor_{of}" for of in ("queries", "keys")
}


def assert_facts(out: str, *names: str) -> None:
    for name in ("python", "mlx", "device", "memory", "backend", *names):
        assert re.search(rf"^{name} +\S", out, re.MULTILINE), name


def test_info_names_versions_device_and_backends(tiny_model, capsys):
    assert main(["info", "--model", str(tiny_model)]) == 0
    out, err = capsys.readouterr()
    assert_facts(out, "mlx-lm", "  metal", "  reference")
    assert "qwen2" in out and err == ""


def test_the_page_of_some_kernels(capsys):
    assert main(["doctor", "--only", "exp", "rotary_embedding", "gather_qmm"]) == 0
    out, _ = capsys.readouterr()
    assert_facts(out, "results")
    assert len(re.findall(r"^(exp|rotary_embedding|gather_qmm), .* right ", out, re.M)) == 8
    assert "reference: the kernel was not measured on a CPU" in out or HERE != "host"
    assert out.endswith("8 of 8 checks were right\n")


@pytest.mark.slow
def test_all_but_attention(capsys):
    """A family whose kernels take a CPU's compiler as long as all others."""
    families = [family for family in examples.families() if family != "attention"]
    assert main(["doctor", "--only", "model", *families]) == 0
    out, _ = capsys.readouterr()
    assert "55 swapped" in out and re.search(r"^(\d+) of \1 checks were right$", out, re.M)


@on_gpus
def test_on_gpus(gpu, capsys):
    """In a minute on a Mac; CUDA's compiler takes longer."""
    assert main(["doctor", "--budget", "50" if gpu == "metal" else "300"]) == 0
    assert re.search(r"^(\d+) of \1 checks were right$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("device", "other"), [("metal", ON_CPUS | ON_CUDA), ("cuda", ON_CPUS | TENSORS)]
)
def test_every_kernel_is_launched(device, other, machine, capsys):
    """On a stand-in, which gives zeros: so each result is wrong, and the exit code 1."""
    machine.apple() if device == "metal" else machine.nvidia()
    machine.giving_zeros(device)
    with trace() as launches:
        assert main(["doctor", "--one-process", "--only", *examples.families()]) == 1
    out, _ = capsys.readouterr()
    assert not re.search(r" right ", out) and re.search(r"^0 of \d+ checks were right$", out, re.M)
    texts = (path.read_text() for room in (METAL, OPERATIONS) for path in room.rglob("*.metal"))
    every = {name for text in texts for name in re.findall(r"\]\] void (\w+)\(", text)}
    # The names of variants begin as the kernel's.
    names = {each.kernel.replace("dequantize_2", "dequantize_matrices") for each in launches}
    assert every - {max(filter(name.startswith, every), key=len) for name in names} == other


def test_without_kernels(capsys, machine):
    machine()
    assert main(["doctor", "--only", "exp"]) == 0
    assert capsys.readouterr().out.endswith("no kernels run here\n")


@pytest.mark.parametrize(
    ("fault", "shown", "said"),
    [
        ("does not compile", "fails", r"RuntimeError: .* Unable to build metal library"),
        ("crashes", "crashes", "its process ended with SIGSEGV\n"),
    ],
)
def test_a_kernel_with_a_fault(fault, shown, said, machine, monkeypatch, capsys):
    """Is a line of the page, and all others are checked."""
    machine.apple()
    monkeypatch.syspath_prepend(apple_gpu.FOLDER)  # for the process that runs the checks
    monkeypatch.setenv(apple_gpu.FAULTS, json.dumps({"exp_strided": fault}))
    assert main(["doctor", "--only", "exp", "rotary_embedding"]) == 1
    out, _ = capsys.readouterr()
    (row,) = re.findall(rf"^(exp, .*?)  .* {shown}", out, re.MULTILINE)
    assert re.search(f"^{row}: {said}", out, re.MULTILINE)
    assert out.endswith("4 of 5 checks were right\n")


def test_a_check_that_there_is_not(capsys):
    assert main(["doctor", "--only", "cholesky"]) == 2
    assert "there is no check cholesky" in capsys.readouterr().err
