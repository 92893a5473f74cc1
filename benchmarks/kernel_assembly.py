"""Instructions of kernels' inner loops, as clang writes them for several processors.

    python benchmarks/kernel_assembly.py

Nothing runs: each kernel is compiled as by the fast build of the host backend, for another
processor than this one too, and of each loop the instructions of a turn are counted by class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import mlx.core as mx
from common import Table, arguments, output

from mlx_qlayers import attention, quantized_matmul, use_backend
from mlx_qlayers.runtime.backend import current, within
from mlx_qlayers.runtime.host import bound_launch, compiler, toolchain
from mlx_qlayers.runtime.host import llvm_ir as ir
from mlx_qlayers.runtime.host import translate as source

PROCESSORS = {
    "AVX2": ("x86_64-linux-gnu", "-march=haswell"),
    "AVX-512": ("x86_64-linux-gnu", "-march=icelake-server"),
    "NEON": ("aarch64-linux-gnu", "-mcpu=apple-m1"),
}
# Instructions by what they are there for; the first that matches.
CLASSES = {
    "product": r"vf?n?m(add|sub)|vdp|vpdp|vpmadd|vmul|fml|fmul|bfdot|[su]+dot",
    "stack": r".*\[(rsp|rbp|sp)\b",
    "convert": r"vcvt|vpmov[sz]x|[su]cvtf|fcvt|[su]xtl|shll",
    "unpack": r"vps[rl]l|vpand|vpor|vpternlog|vperm|vpshuf|vpunpck|vpmultishift|vp?broadcast"
    r"|vinsert|vpinsr|vextract|vshuf|vpxor|vpblend|(and|orr|ushr|shl|ushl|tbl|zip|uzp|dup)\S*\s+v",
    "memory": r"v?mov[a-z0-9]*\s+.*\[|ld[rp1-4]|st[rp1-4]",
    "arithmetic": r"v(add|sub|max|min|div|padd|psub)|f(add|sub|max|min)",
}
WIDTHS = {512: "zmm", 256: "ymm", 128: r"xmm|\bv[0-9]+\.|\bq[0-9]"}
GROUP, COLUMNS, HEAD = 32, 4, 64  # of Q4_1 and SmolLM2; rows of a matrix in registers
# As often as they are called, which keeps them apart from norms of other dtypes.
_NORMS = """#include "thread_pool.cpp"
extern "C" [[gnu::flatten]] void norms(const Item* item) { norm_rows<__bf16>(item); }
"""
_LABEL, _INSTRUCTION = re.compile(r"^(\.L\w+):"), re.compile(r"^\t(?:\{\w+\}\s+)?([a-z][^#]*)")
_JUMP = re.compile(r"^(?:j|b\.|cbn?z|tbn?z).*?(\.L\w+)")


class _Launched(Exception):
    """A launch reached its compiler: its text and function."""


def launched(run: Callable[[], object], path: str = "host") -> tuple[str, str]:
    """The text and the function that the host backend would compile for a call."""

    def stop(text: str, function: str, **_: object) -> None:
        raise _Launched(text, function)

    # As if it were compiled for the first time.
    again = mock.patch.object(bound_launch, "_compiled", bound_launch._compiled.__wrapped__)
    with use_backend(path), again, mock.patch.object(bound_launch, "compile_source", stop):
        try:
            run()
        except _Launched as found:
            return found.args
    raise AssertionError("nothing was launched")


def assembly(text: str, function: str, target: Sequence[str]) -> str:
    """A kernel as the fast build has it, for a platform and by flags that name a processor."""
    flags = "-target", *target
    with mock.patch.object(toolchain, "target", lambda: flags):
        unit, _ = source.translate(compiler.preprocess(text, {}, 320), function, {})
        strict = compiler.strict(unit, checked=False, debug=False)
    fast = ir.collapse(ir.unalign(strict), all_spaces=True)
    command = ["clang", "-x", "ir", *flags, *_intel(target), "-O3", "-S", "-o", "-", "-"]
    return toolchain.run(command, fast)[0]


def _intel(target: Sequence[str]) -> list[str]:
    return ["-masm=intel"] * target[0].startswith("x86")


def _norms(target: Sequence[str]) -> str:
    """The norms of bfloat16 between launches, which are no kernel but C++."""
    platform, cpu = target  # whose name the driver of C++ spells otherwise
    flags = ["-target", platform, cpu[:7] + cpu[7:].replace("-", "_"), *_intel(target)]
    plain = ["-std=c++17", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all", "-g0"]
    plain.append(f"-I{toolchain.SHIMS}")
    with TemporaryDirectory() as folder:
        made = Path(folder) / "norms.s"
        toolchain.run(["c++", "-x", "c++", *flags, *plain, "-O3", "-S", "-"], _NORMS, made)
        found = re.search(r"^norms:.*?^\.Lfunc_end", made.read_text(), re.S | re.M)
    assert found
    return found[0]


def loops(assembly: str) -> list[list[str]]:
    """The instructions of each innermost loop: from a label to the last jump back to it."""
    lines, at, ends = list[str](), dict[str, int](), dict[int, int]()
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            at[label[1]] = len(lines)
        elif found := _INSTRUCTION.match(line):
            lines.append(found[1].strip())
            if (jump := _JUMP.match(lines[-1])) and jump[1] in at:
                ends[at[jump[1]]] = len(lines)
    inner = ((b, e) for b, e in ends.items() if not any(b < c and d <= e for c, d in ends.items()))
    return [lines[begin:end] for begin, end in inner]


def counted(loop: list[str]) -> Counter[str]:
    """How many instructions are of each class, of all, and the width of vectors in bits."""
    found = Counter(
        next((k for k, pattern in CLASSES.items() if re.match(pattern, line)), "scalar")
        for line in loop
    )
    width = next((w for w, r in WIDTHS.items() if re.search(r, "\n".join(loop))), 0)
    return found + Counter(all=len(loop), bits=width)


def products(loop: list[str]) -> int:
    """How many floats the instructions of a loop multiply."""
    return sum(map(_lanes, loop))


def _lanes(line: str) -> int:
    if not re.match(CLASSES["product"], line):
        return 0
    alone = re.match(r"v\w+ss\s|\w+\s+s\d", line)
    return 1 if alone else next((w // 32 for w, r in WIDTHS.items() if re.search(r, line)), 1)


def _product(rows: int, integers: bool = False) -> tuple[str, str]:
    """A product of rows with a matrix of Q4_1's format."""
    x = mx.zeros((rows, 576), mx.bfloat16)
    packed = mx.quantize(mx.zeros((576, 576), mx.bfloat16), GROUP, 4)
    with within(current, current.get()._replace(integers=integers)):
        return launched(lambda: mx.eval(quantized_matmul(x, *packed, group_size=GROUP, bits=4)))


def _attention(rows: int) -> tuple[str, str]:
    """Attention of the last rows of 256 tokens."""
    q, k = (mx.zeros((1, heads, n, HEAD), mx.bfloat16) for heads, n in ((9, rows), (3, 256)))
    return launched(lambda: mx.eval(attention(q, k, k, scale=0.1, mask="causal")), "auto")


# The subject of a loop, its instructions, and how many of those a turn does.
Found = tuple[str, list[str], float]


def _weights(found: list[list[str]]) -> Iterator[Found]:
    """The loop over groups of weights that are dequantized as they are multiplied with a row."""
    yield "weight", max(found, key=products), GROUP * COLUMNS


def _ready(found: list[list[str]]) -> Iterator[Found]:
    """That of four rows with weights that lie ready as floats."""
    counts = ((loop, counted(loop)) for loop in found)
    loop = max((x for x, n in counts if not n["convert"] + n["unpack"]), key=products)
    yield "multiply-add", loop, products(loop)


def _integers(found: list[list[str]]) -> Iterator[Found]:
    """That of two blocks of weights, with as many rows as there are at once."""
    dots = (x for x in found if re.search(r"dpbusd|maddubs|\b[su]+dot", "\n".join(x)))
    yield "weight", max(dots, key=products), 2 * 32


def _elements(found: list[list[str]]) -> Iterator[Found]:
    """Those of scores, by whole rows of keys, and of weighted sums of values."""
    loop = max(found, key=products)
    yield "key element", loop, products(loop) // HEAD * HEAD
    loop = min(filter(products, found), key=lambda loop: len(loop) / products(loop))
    yield "value element", loop, products(loop)


def _normed(found: list[list[str]]) -> Iterator[Found]:
    """Those of squares and of scaled numbers, which take a product and two."""
    squares, scaled = sorted(found, key=products)[-2:]
    yield "element, squares", squares, products(squares)
    yield "element, scaled", scaled, products(scaled) / 2


# A kernel, the phase and rows of its launch, what makes its text, and which loops are counted.
CASES: tuple[
    tuple[str, str, int, Callable[[], tuple[str, str]] | None, Callable[..., Any]], ...
] = (
    ("qmv_serial", "text", 1, partial(_product, 1), _weights),
    ("qmv_serial", "prompt", 256, partial(_product, 256), _ready),
    ("qmv_serial, int8", "text", 1, partial(_product, 1, True), _integers),
    ("qmv_serial, int8", "guesses", 4, partial(_product, 4, True), _integers),
    ("attention_serial", "text", 1, partial(_attention, 1), _elements),
    ("attention_serial", "prompt", 256, partial(_attention, 256), _elements),
    ("norms", "text", 1, None, _normed),
)


def count_instructions() -> None:
    """Print instructions for each weight or element, by class, for each processor."""
    numbers = ("all", "bits", *CLASSES, "scalar")
    table = Table()
    for kernel, phase, rows, make, pick in CASES:
        launch = make and make()
        for name, target in PROCESSORS.items():
            text = assembly(*launch, target) if launch else _norms(target)
            for unit, loop, each in pick(loops(text)):
                found = counted(loop)
                counts = {key: found[key] / each for key in numbers if key != "bits"}
                row = {"kernel": kernel, "phase": phase, "rows": rows, "processor": name}
                table.add(**row, **{"for each": unit, "bits": found["bits"]}, **counts)


if __name__ == "__main__":
    with output(arguments(__doc__).parse_args(), "kernel_assembly"):
        count_instructions()
