"""Source that some version of Apple's compiler refuses is refused here, by name.

The summary of the test run prints the table.
"""

import pytest

from mlx_qlayers.runtime.host import CompileError, compile_source, lint

_HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
_KERNEL = (
    "kernel void k(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],"
    " constant float& c [[buffer(2)]], uint i [[thread_position_in_grid]]) {"
)

# A fault, declarations, body, the words of the message.
REFUSED = (
    ("device pointer as threadgroup", "float f(threadgroup float* p) { return *p; }",
     "y[i] = f(y);", "no matching function"),
    ("threadgroup pointer as device", "float f(device float* p) { return *p; }",
     "threadgroup float s[4]; y[i] = f(s);", "no matching function"),
    ("device pointer as thread", "float f(thread float* p) { return *p; }", "y[i] = f(y);",
     "a device pointer or object is used where a thread one is declared"),
    ("device reference as thread", "float f(thread float& p) { return p; }", "y[i] = f(y[i]);",
     "a device pointer or object is used where a thread one is declared"),
    ("threadgroup object's thread member", "struct S { float a; float get() { return a; } };",
     "threadgroup S s[1]; y[i] = s[0].get();",
     "a threadgroup pointer or object is used where a thread one is declared"),
    ("constant pointer as device", "float f(const device float* p) { return *p; }", "y[i] = f(&c);",
     "no matching function"),
    ("cast between address spaces", "", "y[i] = *(threadgroup float*)(x + i);",
     "mismatching address spaces"),
    ("more thread memory than a stack has", "",
     "float a[50000]; for (int k = 0; k < 50000; k++) a[k] = x[k] * c;"
     " for (int k = 0; k < int(c); k++) y[i] += a[k * 7 % 50000];",
     "stack frame size"),
    ("write to constant memory", "", "c = 1;", "const"),
    ("write through const device", "", "x[i] = 1;", "read-only variable"),
    ("double", "", "double d = x[i]; y[i] = d;", "double"),
    ("recursion", "float f(float a) { return a < 1 ? a : f(a - 1); }", "y[i] = f(x[i]);",
     "recursion: f calls itself"),
    ("mutual recursion", "float g(float a);\nfloat f(float a) { return a < 1 ? a : g(a - 1); }\n"
     "float g(float a) { return f(a / 2); }", "y[i] = f(x[i]);", "recursion"),
    ("exceptions", "", "if (x[i] < 0) throw 1;", "exceptions"),
    ("virtual function", "struct S { virtual float f() { return 1; } };", "y[i] = 0;", "virtual"),
    ("new", "", "thread float* p = new float[4]; y[i] = p[0];", "'default new' is not supported"),
    ("threadgroup array in a helper", "void f() { threadgroup float s[4]; s[0] = 1; }", "f();",
     "local"),
    ("global that is not constant", "float table[2] = {1, 2};", "y[i] = table[0];", "constant"),
    ("function that Metal lacks", "", "y[i] = erf(x[i]);", "'erf'"),
    ("float to bfloat without a cast", "", "bfloat b = x[i]; y[i] = b;", "bfloat"),
    ("64-bit reduction", "", "y[i] = simd_sum(long(i));", "ambiguous"),
    ("half vector as float vector", "", "float4 v = half4(1); y[i] = v.x;", "cannot initialize"),
    ("as_type of another size", "", "y[i] = as_type<half>(x[i]);", "equal size"),
    ("acquire order", "", "atomic_load_explicit((device atomic_uint*)y, memory_order_acquire);",
     "memory_order_acquire"),
    ("float atomic in threadgroup memory", "",
     "threadgroup atomic_float a; atomic_fetch_add_explicit(&a, 1.0f, memory_order_relaxed);",
     "not for this type and address space"),
    ("maximum of float atomics", "",
     "atomic_fetch_max_explicit((device atomic_float*)y, 1.0f, memory_order_relaxed);",
     "int and uint only"),
    ("matrix of another size", "", "simdgroup_matrix<float, 16, 16> m; y[i] = 0;", "8 x 8"),
    ("uninitialised variable", "", "float a; y[i] = a;", "uninitialized"),
    ("constant index outside an array", "", "float a[2] = {1, 2}; y[i] = a[2];", "past the end"),
    ("vector with too few elements", "", "y[i] = float4(1.0f, 2.0f, 3.0f).x;", "exactly as many"),
    ("printf", "", 'printf("%f", x[i]);', "printf"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "declarations", "body", "says"), REFUSED, ids=lambda v: v[:30])
def test_refused(name, declarations, body, says, record_property):
    with pytest.raises(CompileError) as caught:
        compile_source(f"{_HEAD}{declarations}\n{_KERNEL}\n{body}\n}}", "k", checked=False)
    assert says in str(caught.value)
    line = next(x for x in str(caught.value).split("\n") if says in x)
    record_property("table: source that is refused", [name, "compiler", line.strip()])


LINTED = (
    ("pointer without address space", "float f(float* p) { return *p; }", "no address space"),
    ("reference without address space", "float f(const float4& p) { return p.x; }",
     "address space"),
    ("cast without address space", "uint f(device float* p) { return *(uint*)p; }",
     "address space"),
    ("auto reference", "void f(device float* p) { for (int i = 0; i < 2; i++) auto& q = p[i]; }",
     "address space"),
    ("thread member without thread", "struct S { float a; thread float& get() { return a; } };",
     "`this` is generic"),
    ("address space as a name", "uint f(uint3 thread) { return 0; }", "word of the language"),
    ("lambda", "float f(float a) { auto g = [&](float b) { return b; }; return g(a); }",
     "lambdas"),
    ("goto", "void f() { again: goto again; }", "goto"),
    ("derived class", "struct A { int a; };\nstruct B : A { int b; };", "derived classes"),
    ("bare vec", "vec<float, 2> f() { return 0; }", "metal::vec"),
    ("standard library", "float f(float a) { return std::abs(a); }", "standard library"),
    ("double", "float f(double a) { return a; }", "double"),
    ("noexcept", "float f(float a) noexcept { return a; }", "noexcept"),
    ("stronger memory order", "constant int order = memory_order_seq_cst;", "relaxed"),
    ("inline assembly", 'void f() { asm("nop"); }', "assembly"),
    ("compiler internals", "float f(float a) { return __builtin_expf(a); }", "internals"),
    ("text that is not ASCII", "// caf\u00e9\n", "ASCII"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "says"), LINTED, ids=lambda v: v[:30])
def test_linted(name, text, says, record_property):
    found = lint(f"\n{text}\n")
    assert len(found) == 1 and says in found[0] and found[0][0] in "23", found
    record_property("table: source that is refused", [name, "lint", found[0]])


def test_lint_accepts_metal():
    assert (
        lint("""
        // A pointer in a comment: float* p; std::vector
        struct Tile {
          float values[4];
          Tile() : values{0, 0, 0, 0} {}
          thread float& at(int i) thread { return values[i]; }
          const thread float& at(int i) const thread { return values[i]; }
          float sum() const { return values[0] * values[1]; }
        };
        constant float table[2] = {1, 2};
        template <typename T, int N>
        METAL_FUNC T dot(const device T* x, threadgroup T* s, constant int& n, thread T (&acc)[N]) {
          T total = 0;
          for (int i = 0; i < n; i++) {
            total += x[i] * s[i] & 1;
            const device T* p = x + i;
            auto q = reinterpret_cast<const device uint*>(p);
            total += T(*q) * (i && n);
            if constexpr (metal::is_same_v<T, float> && N) { total = 0; }
          }
          return total * acc[0];
        }
        """)
        == []
    )
