"""Faults in kernels of tensor operations, and what is said of each."""

from dataclasses import dataclass

from mlx_qlayers.runtime.host import (
    CompileError,
    Divergence,
    OutOfBounds,
    Race,
    Undefined,
    Uninitialised,
)

from .tensor_programs import WRONG_LEAST, each


@dataclass(frozen=True)
class Planted:
    """A body with a fault, the exception and what it says; None where the result is wrong."""

    name: str
    body: str
    kind: type[Exception] | None
    says: str = ""
    threads: int = 32
    system: str = "260200"


_CT = "get_destination_cooperative_tensor"
_INPUTS = (
    "auto p = tile.get_left_input_cooperative_tensor<half, half, float>();"
    "auto q = tile.get_right_input_cooperative_tensor<half, half, float>();"
    "auto r = tile.get_destination_cooperative_tensor<decltype(p), decltype(q), float>();"
)
_FILL = each("p", "p[i] = x[at[1] * K + at[0]];") + each("q", "q[i] = w[at[1] * K + at[0]];")
PLANTED = (
    Planted("const operand",
     "tensor<device const half, dextents<int, 2>, tensor_inline> d(x, dextents<int, 2>(K, M));"
     "op.run(d, b, sums);", CompileError, "not const"),
    Planted("types that do not go together", f"auto r = op.{_CT}<matrix, matrix, int>();",
     CompileError, "does not take these types"),
    Planted("half result of float", f"auto r = op.{_CT}<result, matrix, half>();", CompileError,
     "does not take these types"),
    Planted("bfloat on macOS 26.0",
     "tile.get_left_input_cooperative_tensor<bfloat, bfloat, float>();", CompileError, "26.1",
     system="260000"),
    Planted("inputs on macOS 26.1", _INPUTS, CompileError, "26.2", system="260100"),
    Planted("codes of 4 bits on macOS 26.2",
     "tensor<device uint4b_format, dextents<int, 2>, tensor_inline> q((device uchar*)w, "
     "dextents<int, 2>(K, N));", CompileError, "uint4b_format"),
    Planted("codes of 4 bits as an input",
     "tile.get_right_input_cooperative_tensor<half, uint4b_format, float>();", CompileError,
     "right operands in memory only", system="260400"),
    Planted("codes of 4 bits, 24 of them",
     "constexpr auto d = matmul2d_descriptor(16, 32, 24, false, true);"
     "matmul2d<d, execution_simdgroup> o;"
     "tensor<device uint4b_format, dextents<int, 2>, tensor_inline> q((device uchar*)w, "
     "dextents<int, 2>(K, N));" f"auto r = o.{_CT}<matrix, decltype(q), float>();", CompileError,
     "multiple of 32", system="260400"),
    Planted("inputs of two SIMD groups", "matmul2d<fixed, execution_simdgroups<2>> o;"
     "o.get_left_input_cooperative_tensor<half, half, float>();", CompileError,
     "single SIMD group"),
    Planted("statistics of two SIMD groups",
     "pair.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();",
     CompileError, "single SIMD group"),
    Planted("store that would convert",
     "op.run(a, b, sums); matrix h((device half*)y, dextents<int, 2>(N, M)); sums.store(h);",
     CompileError, "do not convert"),
    Planted("tensor of another operation",
     f"auto r = tile.{_CT}<matrix, matrix, float>(); op.run(a, b, r);", CompileError,
     "another operation"),
    Planted("input of another type than the destination",
     "op.run(a, b, sums); constexpr auto next = matmul2d_descriptor(16, 32, 32);"
     "matmul2d<next, execution_simdgroup> second;"
     "auto p = second.get_left_input_cooperative_tensor<half, half, float>(sums);", CompileError,
     "same element type"),
    Planted("copy", "auto other = sums;", CompileError, "deleted"),
    Planted("copy into another",
     "op.run(a, b, sums); auto r = op." + _CT + "<matrix, matrix, float>(); r = sums;",
     CompileError, "deleted"),
    Planted("get_mask", "sums.get_mask(0);", CompileError, "is_valid_element"),
    Planted("tile of 8 x 8",
     "constexpr auto d = matmul2d_descriptor(8, 8); matmul2d<d, execution_simdgroup> o;"
     "auto s = o.get_destination_cooperative_tensor<matrix, matrix, float>();", CompileError,
     "multiple of 16"),
    Planted("destination not cleared",
     f"auto r = add.{_CT}<matrix, matrix, float>(); add.run(a, b, r); r.store(c);", Uninitialised,
     "the destination is read in row"),
    Planted("input not filled", _INPUTS + each("p", "p[i] = 1;") + "tile.run(p, q, r); r.store(c);",
     Uninitialised, "the right operand is read in row"),
    Planted("identity of a maximum left out", "op.run(a, b, sums);"
     "auto most = op.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();"
     "reduce_rows(sums, most, reduction_operation::max);", Undefined,
     "0 is not the identity of a maximum"),
    Planted("identity of a maximum for a minimum", WRONG_LEAST, Undefined,
     "is not the identity of a minimum"),
    Planted("tensor of rank 1 loaded into one of rank 2",
     "tensor<device float, dextents<int, 1>, tensor_inline> from(y, dextents<int, 1>(64), "
     "array<int, 1>{1}); sums.load(from);", CompileError, "is not documented"),
    Planted("depth beyond the operands", f"auto r = tile.{_CT}<matrix, matrix, float>();"
     "auto s = a.slice(32, 0); auto t = b.slice(32, 0); tile.run(s, t, r); r.store(c);",
     OutOfBounds, "a fixed depth of 32 reaches past the operands, which have 8 and 8"),
    Planted("fixed tile beyond its tensor",
     "auto s = a.slice<32, 16>(16, 0); auto t = b.slice<32, 32>(16, 0);"
     "op.run(s, t, sums); sums.store(c);", OutOfBounds,
     "a fixed tile of 32 columns and 16 rows, of which 24 and 16"),
    Planted("tensor larger than its buffer",
     "matrix d((device half*)x, dextents<int, 2>(K, M + 1)); auto s = d.slice(0, 1);"
     "op.run(s, b, sums); sums.store(c);", OutOfBounds, "buffer 0 (x)"),
    Planted("depths that differ", "auto s = a.slice(8, 0); op.run(s, b, sums);", Undefined,
     "a depth of 32, the right one of 40"),
    Planted("columns that are no neighbours",
     "matrix d((device half*)x, dextents<int, 2>(M, K), array<int, 2>{K, 1});", Undefined,
     "first stride"),
    Planted(
     "slice before its tensor", "auto s = a.slice(-1, 0);", Undefined, "begins before its tensor"),
    Planted("fewer rows than none", "matrix d((device half*)x, dextents<int, 2>(K, M - 20));",
     Undefined, "an extent of a tensor is negative"),
    Planted("elements that are none, read", "op.run(a, b, sums); float sum = 0;"
     "for (ushort i = 0; i < sums.get_capacity(); i++) sum += sums[i]; y[lane] = sum;", Undefined,
     "no valid element"),
    Planted("elements that are none, written",
     "for (ushort i = 0; i < sums.get_capacity(); i++) sums[i] = 0;", Undefined,
     "no valid element"),
    Planted("elements that are none, by an iterator",
     "for (auto it = sums.begin(); it != sums.end(); it++) *it = 0;", Undefined,
     "no valid element"),
    Planted("row of an element that is none",
     "auto most = op.get_row_reduction_destination_cooperative_tensor<matrix, matrix, float>();"
     "for (auto it = sums.begin(); it != sums.end(); it++) most.map_iterator(it);", Undefined,
     "map_iterator of slot"),
    Planted("run of half the lanes", "if (lane < 16) op.run(a, b, sums);", Divergence, "16 of 32"),
    Planted("run in two branches", "if (lane < 16) op.run(a, b, sums); else op.run(a, b, sums);",
     Divergence, "different places"),
    Planted("scope of two SIMD groups in three", "pair.run(a, b, c);", Divergence,
     "a scope of 2 SIMD groups in a threadgroup of 96 threads", threads=96),
    Planted("one SIMD group of two", "if (simd == 0) pair.run(a, b, c);", Divergence, "take part",
     threads=64),
    Planted("another slice in each lane", "auto s = a.slice(0, lane % 2); op.run(s, b, sums);",
     Divergence, "the left operand is not the same in threads"),
    Planted("result read without a barrier", "op.run(a, b, c); y[lane] += 1;", Race, "race"),
    Planted("element beyond the capacity",
     "op.run(a, b, sums); y[lane] = sums.is_valid_element(sums.get_capacity());", OutOfBounds,
     "of which each thread has"),
    Planted("slice with row before column",
     "auto s = a.slice(8, 0); auto d = a.slice(0, 8); auto t = b.slice(8, 0);"
     "auto u = d.slice(8, 0); op.run(u, t, sums); sums.store(c);", None),
    Planted("fixed map of lanes", _INPUTS + _FILL + "tile.run(p, q, r);"
     "int f = lane >> 2; for (int i = 0; i < 16; i++) "
     "y[((f & 4 | lane >> 1 & 3) + i % 8 / 4 * 8) * N"
     " + (f & 2 | lane & 1) * 4 + i % 4 + i / 8 * 16]" " = r[i];", None),
)  # fmt: skip
