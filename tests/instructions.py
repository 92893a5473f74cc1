"""Counts the instructions of kernels' inner loops in LLVM's IR, beside those of MLX's own kernels.

    python tests/instructions.py     # writes docs/instructions.md; a minute, no GPU

The host's compiler optimises a kernel without vectors of this machine and unrolls what has a known
length, as Apple's does. Meetings of lanes and matrix products are one instruction each, and what is
done to a vector counts for each element.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from kernel_assembly import launched

from mlx_qlayers import attention
from mlx_qlayers.formats import Format
from mlx_qlayers.metal.attention.layout import layout
from mlx_qlayers.metal.quantized_matmul.qmm import qmm, qmm_config
from mlx_qlayers.metal.quantized_matmul.qmv import single_qmv
from mlx_qlayers.metal.quantized_matmul.qmv_config import qmv_config
from mlx_qlayers.metal.quantized_matmul.tile import Tile
from mlx_qlayers.options import MatmulCall, PackedMatrix
from mlx_qlayers.runtime.host import compiler, toolchain
from mlx_qlayers.runtime.host import llvm_ir as ir
from mlx_qlayers.runtime.host import translate as source
from mlx_qlayers.runtime.host.alu_cycles import cycles
from mlx_qlayers.runtime.metal import widened
from mlx_qlayers.runtime.spec import Spec

PAGE = Path(__file__).parents[1] / "docs" / "instructions.md"
SINGLE = (
    *(Format(64, bits) for bits in (2, 3, 4, 5, 6, 8)),
    *(Format(32, 4, "mxfp4"), Format(32, 8, "mxfp8"), Format(16, 4, "nvfp4")),
)
# On the matrix units: whole words, bytes in bfloat16, and runs that begin within words.
FEW = (
    (Format(64, 4), mx.bfloat16),
    (Format(64, 8), mx.float16),
    (Format(64, 8), mx.bfloat16),
    (Format(64, 3), mx.bfloat16),
    (Format(32, 5), mx.float16),
)
CLASSES = ("float", "integer", "memory", "simd", "matrix")
_KINDS = {
    "float": "fadd fsub fmul fdiv frem fneg fcmp fpext fptrunc sitofp uitofp fptosi fptoui",
    "integer": "add sub mul udiv sdiv urem srem and or xor shl lshr ashr icmp select zext sext "
    "trunc",
    "memory": "load store atomicrmw cmpxchg",
}
_CLASS_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_INSTRUCTION = re.compile(r"^  (?:%[\w.]+ = )?(?:(?:tail|notail|musttail) )?(\w+) (.*)")
_LABEL = re.compile(r"^([\w.$-]+):", re.M)
_TARGET = re.compile(r"label %([\w.$-]+)")
_LANES = re.compile(r"<(\d+) x ")
_CALLS = {
    "matrix": re.compile(r"@\w*qk_counted_product"),
    "simd": re.compile(r"@\w*qk_shuffle"),
    "float": re.compile(r"@llvm\.(?:f|min|max|exp|log|sqrt|copysign)"),
    "integer": re.compile(r"@llvm\.(?:[su]min|[su]max|abs|fsh[lr]|ctlz|cttz)"),
}
# Whole loops, and no parts of those whose length is not known.
_UNROLLED = ("-mllvm", "-unroll-threshold=1000000", "-mllvm", "-unroll-runtime=false")


def main_loop(
    text: str, function: str, constants: Mapping[int, object] | None = None
) -> Counter[str]:
    """The instructions of one turn of the loop that computes most, without loops inside.

    Args:
        text: complete Metal source; MLX's installed headers can be included.
        function: the kernel, with its template arguments.
        constants: the values of its function constants.

    Returns:
        How many there are of each of :data:`CLASSES`, of ``wide``, multiplications of 64 bits, and
        under ``cycles`` what their arithmetic costs on an Apple M1. Those of vectors count for
        each element.

    Raises:
        CompileError: the source is not Metal as the host's compiler takes it.
    """
    unit = _optimised(text, function, constants or {})
    loops = [loop for _, body in ir.functions(unit) for loop in _each_loop(body)]
    return max(map(_count, loops), key=lambda c: (c["matrix"], c["float"]), default=Counter())


def _optimised(text: str, function: str, constants: Mapping[int, object]) -> str:
    headers, own = compiler.split(compiler.preprocess(text, {"QK_COUNTED": "1"}, 320))
    preamble = compiler.precompile(headers, constants, checked=False)
    unit, _ = source.translate(own, function, constants, preamble.declared)
    strict = compiler.strict(unit, checked=False, debug=False, preamble=preamble)
    plain = ["-O3", "-fno-vectorize", "-fno-slp-vectorize", *_UNROLLED, "-S", "-emit-llvm"]
    command = ["clang", "-x", "ir", *toolchain.target(), *plain, "-o", "-", "-"]
    return toolchain.run(command, ir.collapse(strict, all_spaces=False))[0]


def _each_loop(body: str) -> Iterator[list[str]]:
    """The instructions of each loop, without those of loops inside."""
    parts = _LABEL.split("entry:\n" + body)[1:]
    blocks = dict(zip(parts[::2], parts[1::2], strict=True))
    edges = {name: set(_TARGET.findall(block)) for name, block in blocks.items()}

    def within(names: Set[str]) -> Iterator[Set[str]]:
        for loop in _loops({name: edges[name] & names for name in names}):
            # Loops inside have a way round without the blocks where this one is entered.
            entered = {n for name in edges.keys() - loop for n in edges[name] & loop}
            inside = list(within(loop - entered))
            yield from inside
            yield loop.difference(*inside)

    for loop in within(edges.keys()):
        yield [line for name in loop for line in blocks[name].split("\n")]


def _loops(edges: Mapping[str, Set[str]]) -> set[frozenset[str]]:
    """The sets of blocks each of which leads to all of them."""
    leads = {name: _reached(name, edges) for name in edges}
    return {
        frozenset(n for n in found if name in leads[n])
        for name, found in leads.items()
        if name in found
    }


def _reached(name: str, edges: Mapping[str, Set[str]]) -> set[str]:
    found: set[str] = set()
    work = [name]
    while work:
        more = edges[work.pop()] - found
        found |= more
        work += more
    return found


def _count(lines: list[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in lines:
        if not (match := _INSTRUCTION.match(line)):
            continue
        name, operands = match.groups()
        kind = _class_of(name, operands)
        lanes = _LANES.search(operands.partition(",")[0]) if kind in ("float", "integer") else None
        found[kind] += int(lanes[1]) if lanes else 1
        found["wide"] += name == "mul" and " i64 " in f" {operands}"
        found["cycles"] += 0 if name == "getelementptr" else cycles(line)
    return Counter({name: found[name] for name in (*CLASSES, "wide", "cycles")})


def _class_of(name: str, operands: str) -> str:
    if name != "call":
        return _CLASS_OF.get(name, "other")
    for kind, pattern in _CALLS.items():
        if pattern.search(operands):
            return kind
    return "other"


@dataclass(frozen=True)
class Row:
    """A loop, and how many of `unit` a lane does in a turn of it."""

    kernel: str
    case: str
    unit: str
    counted: Counter[str]
    per: float
    needed: float = 0  # matrix products that the result itself takes

    def each(self, name: str) -> float:
        """Instructions of a class for each of the unit."""
        return self.counted[name] / self.per

    @property
    def total(self) -> float:
        """Instructions of all classes for each of the unit."""
        return sum(map(self.each, CLASSES))


def _mlx(family: str, *headers: str) -> str:
    names = "utils", *headers
    return "".join(f'#include "mlx/backend/metal/kernels/{name}.h"\n' for name in names)


_QUANTIZED = {
    "affine": _mlx("affine", "steel/gemm/gemm", "quantized_utils", "quantized"),
    "fp": _mlx("fp", "steel/gemm/gemm", "quantized_utils", "fp_quantized"),
}
_ATTENTION = _mlx("attention", "steel/attn/kernels/steel_attention")


def single_rows(fmt: Format) -> tuple[Row, Row]:
    """One row of float16 times a matrix: MLX's qmv_fast and qmv."""
    group, bits, mode = fmt
    taken, family = 8 if bits in (6, 8) else 16, "affine" if mode == "affine" else "fp"
    function = f"{family}_qmv_fast<half, {group}, {bits}, false>"
    stock = main_loop(_QUANTIZED[family], function)
    config, counted = _qmv(1, fmt, mx.float16)
    assert isinstance(config, Tile) and config.kernel == "qmv"
    case = f"{_name(fmt)}, M = 1"
    return (
        Row("MLX qmv_fast", case, "weight", stock, 4 * taken),
        Row("qmv", case, "weight", counted, config.outputs * config.run),
    )


def _name(fmt: Format) -> str:
    if fmt.mode != "affine":
        return fmt.mode
    return f"{fmt.bits} bits" + f" in groups of {fmt.group_size}" * (fmt.group_size != 64)


def _qmv(rows: int, fmt: Format, dtype: mx.Dtype) -> tuple[object, Counter[str]]:
    n, k = 4608, 256
    packed = mx.quantize(mx.zeros((n, k), dtype), **fmt._asdict())
    arrays = mx.zeros((rows, k), dtype), *packed
    x, *matrix = map(Spec.of, arrays)
    config = qmv_config("metal", rows, n, k, dtype, fmt)
    launch = single_qmv(MatmulCall(x, PackedMatrix(*matrix), True, fmt), config)
    return config, main_loop(*launched(lambda: mx.eval(launch(*arrays))))


def qmv_rows(rows: int, fmt: Format, dtype: mx.Dtype) -> Row:
    """A few rows on the matrix units."""
    config, counted = _qmv(rows, fmt, dtype)
    assert isinstance(config, Tile) and config.kernel == "qmv_matrix"
    weights = config.tiles * 16 * 4 * config.run * config.ahead
    case = f"{_name(fmt)}, {str(dtype).removeprefix('mlx.core.')}, M = {rows}"
    return Row("qmv_matrix", case, "weight", counted, weights / 32, weights / 64 * -(-rows // 8))


def many_queries(mask: str) -> tuple[Row, Row]:
    """Attention of many queries of 64 numbers: MLX's kernel and the forward pass."""
    masked = mask == "additive"
    flags = {200: True, 201: True, 300: masked, 301: False, 302: False, 303: False}
    stock = main_loop(_ATTENTION, "attention<half, 32, 32, 64, 64, 4, 1, half, float>", flags)
    q, seen = mx.zeros((1, 1, 256, 64), mx.float16), mx.zeros((1, 1, 256, 256), mx.float16)
    chosen = layout("forward", "metal", q.dtype, 64)
    options = {"scale": 0.1, "mask": seen if masked else None}
    counted = main_loop(*launched(lambda: mx.eval(attention(q, q, q, **options))))
    scores = chosen.tile * 16 * chosen.blocks / 32
    return (
        Row("MLX attention", f"{mask} mask", "score", stock, 8.0),
        Row("attention_forward", f"{mask} mask", "score", counted, scores),
    )


def widening() -> Iterator[tuple[str, float]]:
    """The instructions of a lane that widened bfloat adds, by matrix product.

    GPUs before the M3 convert four elements for each product of parts that are not.
    """
    dtype, fmt = mx.bfloat16, FEW[0][0]
    x, q = mx.zeros((512, 512), dtype), mx.zeros((1, 1, 256, 64), dtype)
    packed = mx.quantize(x, **fmt._asdict())
    few = mx.zeros((8, 512), dtype)

    def product(x: mx.array) -> list[mx.array]:
        (m, k), (outer, _) = x.shape, packed[0].shape
        call = MatmulCall(Spec.of(x), PackedMatrix(*map(Spec.of, packed)), True, fmt)
        if m > 16:
            return [qmm(call, qmm_config("metal", m, outer, k, dtype, fmt, True))(x, *packed, None)]
        return [single_qmv(call, qmv_config("metal", m, outer, k, dtype, fmt))(x, *packed)]

    def attend() -> mx.array:
        return attention(q, q, q, scale=0.1)

    runs = {"qmv_matrix": lambda: product(few), "qmm": lambda: product(x), "attention": attend}
    for name, run in runs.items():
        text, function = launched(lambda run=run: mx.eval(run()))
        plain, wide = main_loop(text, function), main_loop(widened(text), function)
        more = sum(wide[kind] - plain[kind] for kind in ("float", "integer", "memory"))
        yield name, more / plain["matrix"]


def rows() -> Iterator[Row]:
    """All that the page shows."""
    for fmt in SINGLE:
        yield from single_rows(fmt)
    for m in (4, 8, 16):
        for fmt, dtype in FEW:
            yield qmv_rows(m, fmt, dtype)
    for mask in ("no", "additive"):
        yield from many_queries(mask)


_HEADER = ("kernel", "case", "for each", *CLASSES, "all", "64-bit products", "M1 cycles")


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of its header."""
    numbers = [*map(row.each, CLASSES), row.total, row.each("wide"), row.each("cycles")]
    return [row.kernel, row.case, row.unit, *(f"{n:.2f}" for n in numbers)]


def main() -> None:
    """Write the page."""
    lines = [_HEADER, ["---"] * 3 + ["---:"] * (len(_HEADER) - 3), *map(cells, rows())]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = PAGE.read_text()
    head, begin, rest = text.partition("<!-- table -->\n")
    PAGE.write_text(head + begin + table + "\n" + rest[rest.index("<!-- end -->") :])
    print(table)


if __name__ == "__main__":
    main()
