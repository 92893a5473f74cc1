"""Integer products as other processors run them: which instructions, and exactly which sums."""

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from kernel_assembly import assembly, compiling_for, launched, loops

from mlx_qlayers.formats import Format
from mlx_qlayers.metal.quantized_matmul.qmv import single_qmv
from mlx_qlayers.metal.quantized_matmul.qmv_config import qmv_config
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime.backend import current, within
from mlx_qlayers.runtime.host import compile_source
from mlx_qlayers.runtime.spec import Spec
from tests import arm

OUTPUTS = 37  # a tile, and a part of one
# The dot product that multiplies codes of 4 and of 8 bits.
PROCESSORS = {
    "cortex-a76": {4: "sdot", 8: "udot"},
    "apple-m1": {4: "sdot", 8: "udot"},
    "neoverse-v1": {4: "usdot", 8: "usdot"},
}
# Of x86 the flags, what a processor that runs such code has, and the product of bytes in it.
X86 = {
    "haswell": ("avx2", "vpmaddubsw"),
    "haswell -mavxvnni": ("avx_vnni", "vpdpbusd"),
    "skylake-avx512": ("avx512bw", "vpmaddubsw"),
    "cascadelake": ("avx512_vnni", "vpdpbusd"),
}
PRODUCTS, CPU = {name for _, name in X86.values()}, Path("/proc/cpuinfo")
FEATURES = CPU.read_text().split() if CPU.exists() else []


class Narrowed:
    """This processor, with a kernel that is compiled for one that has less."""

    def __init__(self, launch, cpu):
        target = "x86_64-linux-gnu", *f"-march={cpu}".split()
        lines = [line for loop in loops(assembly(*launch, target)) for line in loop]
        self.executed = PRODUCTS & {line.split()[0] for line in lines}
        compile_source("kernel void f() {}", "f", checked=False)  # loads the runtime library
        with compiling_for(*target):
            self._kernel = compile_source(*launch, checked=False)

    def run(self, arrays, threads):
        size, last = (threads, 1, 1), len(arrays) - 1
        self._kernel.run(dict(enumerate(arrays)), size, (1, 1, 1), writes=[last])
        return arrays


def _launched(fmt, rows):
    packed = mx.quantize(mx.zeros((OUTPUTS, 1024)), **fmt._asdict())
    arrays = mx.zeros((rows, 1024)), *packed
    x, *matrix = map(Spec.of, arrays)
    with within(current, current.get()._replace(integers=True)):
        config = qmv_config("host", rows, OUTPUTS, 1024, x.dtype, fmt)
    assert config.integers
    launch = single_qmv(MatmulCall(x, PackedMatrix(*matrix), True, fmt), config)
    return launched(lambda: mx.eval(launch(*arrays)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cpu", PROCESSORS)
def test_the_inner_loop_of_a_row(cpu, bits):
    """Of 64 codes a turn; neither bytes nor products are widened."""
    text = (arm.compiled(*_launched(Format(64, bits), 1), cpu) / "kernel.s").read_text()
    name, turns = PROCESSORS[cpu][bits], (Counter(x.split()[0] for x in y) for y in loops(text))
    (turn,) = [turn for turn in turns if turn[name]]
    assert turn[name] == (8 if name == "udot" else 4) and turn["scvtf"] == 2
    assert turn.total() <= (35 if name == "udot" else 30)
    assert not any(other.startswith(("smull", "sshll", "mul", "addp")) for other in turn)


def _case(rng, rows, k, fmt, values):
    """Numbers whose products and sums float32 holds exactly; steps of blocks are powers of two."""
    most, groups = 2**fmt.bits - 1, (OUTPUTS, k // fmt.group_size)
    w, x = np.full((OUTPUTS, k), most), np.full((rows, k // 32, 32), -127.0)
    scales, biases = np.ones(groups), np.zeros(groups)
    if values == "random":
        w, x = rng.integers(0, most + 1, w.shape), rng.integers(-127, 128, x.shape) * 1.0
        x[..., rng.integers(32)] = 127
        x *= 2.0 ** -rng.integers(0, 3, x.shape[:2])[..., None]
        scales, biases = 2.0 ** -rng.integers(0, 3, groups), rng.integers(-8, 9, groups) * 1.0
    elif values == "signs":
        x *= rng.choice([-1, 1], x.shape)
    x = x.reshape(rows, k)
    dense = w * scales.repeat(fmt.group_size, 1) + biases.repeat(fmt.group_size, 1)
    codes = w.astype(np.uint8)
    if fmt.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    floats = [n.astype(np.float32) for n in (x, scales, biases)]
    return [floats[0], np.ascontiguousarray(codes).view(np.uint32), *floats[1:]], x @ dense.T


@pytest.mark.parametrize(
    ("cpu", "group", "bits", "rows"),
    [
        ("cortex-a76", 64, 4, 1),
        ("cortex-a76", 32, 4, 8),
        ("cortex-a76", 32, 8, 1),
        ("cortex-a76", 128, 8, 8),
        ("neoverse-v1", 128, 4, 1),
        ("neoverse-v1", 64, 8, 8),
        ("cortex-a72", 64, 4, 8),  # without dot products
        ("cortex-a72", 128, 8, 1),
        ("haswell", 32, 4, 8),
        ("haswell", 64, 8, 1),
        ("haswell -mavxvnni", 64, 4, 1),
        ("haswell -mavxvnni", 32, 8, 8),
        ("skylake-avx512", 128, 8, 8),
        ("cascadelake", 128, 4, 8),
    ],
)
def test_sums_are_exact(cpu, group, bits, rows):
    fmt, rng = Format(group, bits), np.random.default_rng(bits * group + rows)
    launch, (feature, wanted) = _launched(fmt, rows), X86.get(cpu, (None, None))
    if feature is None:
        processor = arm.Processor((arm.compiled(*launch, cpu) / "kernel").read_bytes())
        wanted = PROCESSORS.get(cpu, {}).get(bits)
    elif feature in FEATURES:
        processor = Narrowed(launch, cpu)
    else:
        pytest.skip(f"this processor has no {feature}")
    several = [7] if cpu == "neoverse-v1" else [2, 7, 8]  # whose usdot takes long
    for values, k in [("random", 128), ("random", 1152), ("signs", 512), ("most", 512)]:
        for m in [1] if rows == 1 else several:
            given, truth = _case(rng, m, k, fmt, values)
            shape, y = np.array([m, k, OUTPUTS], np.int32), np.full((m, OUTPUTS), np.nan, "f4")
            np.testing.assert_array_equal(processor.run([*given, shape, y], 2)[-1], truth)
    assert set(processor.executed) - {"all"} == {wanted} - {None}
