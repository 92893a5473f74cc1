"""Runs launches by ``mx.fast.cuda_kernel``. For NVIDIA GPUs alone, frozen.

The Metal source is compiled as CUDA C++ behind the headers in ``shims/cuda``. The rest is
rewritten here, token by token: see :func:`translate`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ..runtime.devices import device_of
from . import source
from .backend import BackendError
from .cache_folder import own_folder
from .cuda_ahead import begin, shims_digest, type_name
from .generated_source import ATTRIBUTES, shape_words
from .launch import Bound, Launch, Size, TemplateValue, added_to_graph
from .program import Program
from .source import METAL, TENSOR_OPS, Token
from .spec import Spec
from .staging import replace_file

SHIM = Path(__file__).parent / "shims" / "cuda" / "msl.h"
# Characters from which a kernel's text is worth a file.
_LONG = 2048
# The most that CUDA starts along y and z, where Metal knows no such limit.
_MOST_GROUPS, _MOST_DEEP = 2**16 - 1, 64
# Their declarations, and those of the files that they include, come from the shim instead.
_SHIMMED = tuple(
    METAL / f"common/{name}.metal" for name in ("operands", "tile_products", "arrival")
)
# The template parameters that say how many threadgroups a multiprocessor should hold, and whether
# SIMD groups run tensor operations in lockstep; and what holds without them.
_TOLD = ("RESIDENT", 1), ("LOCKSTEP", False)
# And the one that says how many bytes of dynamic shared memory the kernel takes.
_SHARED = "SHARED"
# The input that tells threads beyond the grid that they are surplus.
_LIMIT = "msl_grid_limit"

_DECIMAL = re.compile(r"(?!0[xX])(?=.*[.eE])([\d.]+(?:[eE][+-]?\d+)?)(f|F|h|H|bf|BF)?$")
# In Metal these are one type with int64_t and uint64_t; in CUDA they are others of that size.
_WIDE = {"long": "int64_t", "size_t": "uint64_t", "ptrdiff_t": "int64_t"}
_WIDE_NUMBER = re.compile(r"(?:0[xX][\da-fA-F]+|\d+)[uU]?[lL]$")
_COMPONENTS = re.compile(r"[xyzw]{2,4}$")
_UNROLL = re.compile(r"clang loop unroll(?:_count)?\((\w+)\)")


def bind(launch: Launch) -> Bound:
    """A function that adds a launch to MLX's graph."""
    grid, surplus = _fitting(launch)
    variant = launch.program, launch.threadgroup, bool(surplus), tuple(launch.template)
    names = _input_names(launch.program, bool(surplus))
    specs = [*launch.inputs, *map(Spec.of, surplus)]
    outputs = zip(launch.program.output_names, launch.output_dtypes, strict=True)
    begin(*_text(*variant), [*zip(names, specs, strict=True)], [*outputs])
    inputs = (lambda given: given + surplus) if surplus else None
    return added_to_graph(
        launch, "cuda", lambda make: _kernel(make, *variant), bind, inputs, grid=grid, template=[]
    )


def _fitting(launch: Launch) -> tuple[Size, list[mx.array]]:
    """The threads to start and, if they are more than the grid's, the input that says so."""
    grid = whole_threadgroups(launch.grid, launch.threadgroup)
    _, y, z = (g // t for g, t in zip(grid, launch.threadgroup, strict=True))
    if max(y, z) > _MOST_GROUPS or launch.threadgroup[2] > _MOST_DEEP:
        raise BackendError(
            f"kernel {launch.program.name}: CUDA takes {_MOST_GROUPS} threadgroups along y and z "
            f"of at most {_MOST_DEEP} threads along z, not grid {launch.grid} with threadgroup "
            f"{launch.threadgroup}"
        )
    return grid, [mx.array(launch.grid, mx.uint32)] if grid != launch.grid else []


@lru_cache(maxsize=2048)
def _kernel(
    make: Callable[..., Any],
    program: Program,
    threadgroup: Size,
    surplus: bool,
    template: tuple[tuple[str, TemplateValue], ...],
) -> Callable[..., list[mx.array]]:
    """The kernel for one choice of the template's parameters, which its text and name hold.

    As arguments of each call they would be formatted there, which takes longer than all the rest.
    """
    name, header, body = _text(program, threadgroup, surplus, template)
    return make(
        name=name,
        input_names=_input_names(program, surplus),
        output_names=program.output_names,
        source=body,
        header=header,
        ensure_row_contiguous=program.ensure_row_contiguous,
        shared_memory=cast(int, dict(template).get(_SHARED, 0)),
    )


def _input_names(program: Program, surplus: bool) -> list[str]:
    return [*program.input_names, _LIMIT] if surplus else list(program.input_names)


@lru_cache(maxsize=2048)
def _text(
    program: Program,
    threadgroup: Size,
    surplus: bool,
    template: tuple[tuple[str, TemplateValue], ...],
) -> tuple[str, str, str]:
    """Name, header and source of that kernel."""
    resident, lockstep = (cast(int, dict(template).get(n, d)) for n, d in _TOLD)
    header, body = cuda_source(program, threadgroup, surplus, resident, bool(lockstep))
    # MLX looks for these words in the text to know which parameters to add.
    words = " ".join(w.split()[-1] for p in program.inputs for w in shape_words(body, p.name))
    constants = "".join(_constant(name, value) for name, value in template)
    body = f"// {words}\n{constants}{_kept(body)}"
    header = _kept(header)
    # MLX knows a compiled kernel by its name alone, in this process and on disk.
    whole = "\0".join((header, body, shims_digest(SHIM.parent), device_of("cuda").name))
    return f"{program.name}_{sha256(whole.encode()).hexdigest()[:16]}", header, body


def _constant(name: str, value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        kind = type_name(value)
        return f"using {name}={kind};\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name}={str(value).lower()};\n"


def _kept(text: str) -> str:
    """A long text as an ``#include``, since MLX hashes it in each launch: 8 us for 15 KB."""
    if len(text) < _LONG:
        return text
    try:
        folder = own_folder("cuda")
        path = folder / f"{sha256(text.encode()).hexdigest()[:32]}.h"
        if not path.exists() or path.read_bytes() != text.encode():
            replace_file(path, text)
    except OSError:
        return text
    return f'#include "{path}"\n'


def whole_threadgroups(grid: Size, threadgroup: Size) -> Size:
    """The threads that CUDA starts for a grid: it has no smaller threadgroups at the edges."""
    x, y, z = (-(-g // t) * t for g, t in zip(grid, threadgroup, strict=True))
    return x, y, z


def cuda_source(
    program: Program,
    threadgroup: Size,
    surplus: bool,
    resident: int = 1,
    lockstep: bool = False,
) -> tuple[str, str]:
    """A kernel's ``header`` and ``source`` for ``mx.fast.cuda_kernel``, for one threadgroup size.

    ``surplus`` says whether threads beyond the grid are started and must return at once,
    ``resident`` how many threadgroups a multiprocessor must have registers for, ``lockstep``
    whether all SIMD groups run each tensor operation at the same time with the same operands.
    """
    header = program.header.replace(f"#include {TENSOR_OPS}\n", "")
    # Kernels share declarations, and none of these reads differently beside others.
    rows = source.without(header, _SHIMMED).split("\n")
    helpers = "\n".join(filter(None, map(translate, rows)))
    header = f"#define MSL_GROUP_SIZE {prod(threadgroup)}\n#define MSL_RESIDENT {resident}\n"
    header += f'#define MSL_LOCKSTEP {int(lockstep)}\n#include "{SHIM}"\n'
    if helpers:
        # MLX puts the kernel into this namespace too; the shim's names hide CUDA's there.
        header += f"namespace mlx::core::cu {{\n{helpers}\n}}\n"
    # A parameter takes its Metal form under its own name in an inner block.
    outer, inner = [], []
    for name, value in _adapted(program):
        outer.append(f"auto&& {name}_msl={value};")
        inner.append(f"auto&& {name}={name}_msl;")
    lines = ["".join([*outer, "{", *inner])] if outer else []
    # A kernel leaves out its code for a missing array where it knows that there is one.
    given = [p.name for p in program.inputs if not p.reference] + list(program.output_names)
    lines.append("".join([f"__builtin_assume({name}!=nullptr);" for name in given]))
    lines += _attributes(program.source, threadgroup, surplus)
    lines.append(translate(program.source, kernel=True))
    return header, "\n".join(lines) + ("}" if outer else "")


def _adapted(program: Program) -> Iterator[tuple[str, str]]:
    """The parameters that CUDA gets in another form than Metal, and the form that Metal has."""
    for parameter in program.inputs:
        if parameter.reference:
            yield parameter.name, f"*{parameter.name}"
        for word in shape_words(program.source, parameter.name):
            if "*" in word:
                name = word.split()[-1]
                yield name, f"{name}.data()"
    if program.atomic_outputs:
        for name in program.output_names:
            yield name, f"as_atomic({name})"


def _attributes(text: str, threadgroup: Size, surplus: bool) -> list[str]:
    """Statements that define the attributes which the body uses, and end surplus threads."""
    x, y, z = threadgroup
    size = prod(threadgroup)
    thread = "threadIdx.x" if y == z == 1 else f"(threadIdx.x+{x}*(threadIdx.y+{y}*threadIdx.z))"
    position = ",".join(
        f"blockIdx.{a}*{t}+threadIdx.{a}" for a, t in zip("xyz", threadgroup, strict=True)
    )
    started = ",".join(f"gridDim.{a}*{t}" for a, t in zip("xyz", threadgroup, strict=True))
    threads = f"{_LIMIT}[0],{_LIMIT}[1],{_LIMIT}[2]" if surplus else started
    values = {
        "dispatch_quadgroups_per_threadgroup": f"{-(-size // 4)}",
        "dispatch_simdgroups_per_threadgroup": f"{-(-size // 32)}",
        "dispatch_threads_per_threadgroup": f"{x},{y},{z}",
        "grid_origin": "0,0,0",
        "grid_size": threads,
        "quadgroup_index_in_threadgroup": f"{thread}/4",
        "quadgroups_per_threadgroup": f"{-(-size // 4)}",
        "simdgroup_index_in_threadgroup": f"{thread}/32",
        "simdgroups_per_threadgroup": f"{-(-size // 32)}",
        "thread_execution_width": "32",
        "thread_index_in_quadgroup": f"{thread}%4",
        "thread_index_in_simdgroup": f"{thread}%32",
        "thread_index_in_threadgroup": thread,
        "thread_position_in_grid": position,
        "thread_position_in_threadgroup": "threadIdx.x,threadIdx.y,threadIdx.z",
        "threadgroup_position_in_grid": "blockIdx.x,blockIdx.y,blockIdx.z",
        "threadgroups_per_grid": "gridDim.x,gridDim.y,gridDim.z",
        "threads_per_grid": threads,
        "threads_per_simdgroup": "32",
        "threads_per_threadgroup": f"{x},{y},{z}",
    }
    used = {*re.findall(r"[A-Za-z_]\w*", text)}  # of text without comments; tokens take 20 ms
    lines = [
        f"const {kind} {name}({values[name]});" for name, kind in ATTRIBUTES.items() if name in used
    ]
    if surplus:
        outside = "||".join(f"{part}>={_LIMIT}[{i}]" for i, part in enumerate(position.split(",")))
        lines.append(f"if({outside})return;")
    return lines


@lru_cache(maxsize=16384)
def translate(text: str, *, kernel: bool = False) -> str:
    """Rewrite what C++ headers cannot express of the Metal Shading Language.

    - Decimal literals without a suffix are float, ``1.0h`` is a half: ``1.0f``, ``half(1.0f)``.
    - ``long``, ``size_t``, ``3l``: ``int64_t``, ``uint64_t``, ``3ll``, which MLX's arrays hold.
    - Swizzles, ``v.xyz``: ``v.get<0,1,2>()``, or ``v.set<0,1,2>()`` if assigned to.
    - ``#pragma clang loop unroll(full)``: ``#pragma unroll``.
    - In a kernel, variables declared ``threadgroup`` become ``__shared__``; pointers stay pointers.

    Args:
        text: Metal source.
        kernel: whether it is the body of a kernel.

    Example:
        >>> translate("v.xy = 0.5 * w.zw;")
        'v.template set<0,1>()=0.5f*w.template get<2,3>();'
    """
    tokens = list(source.tokenize(text))
    found = []
    for i, token in enumerate(tokens):
        new = token.text
        if token.kind == "number":
            new = _number(new)
        elif token.kind == "directive":
            new = _directive(new)
        elif token.kind == "string":
            new = _UNROLL.sub(_unroll, new)
        elif new in _WIDE and not (i and tokens[i - 1].text == "unsigned"):
            new = _WIDE[new]
        elif token.kind == "word" and _COMPONENTS.match(new) and _is_member(tokens, i):
            indices = ",".join(str("xyzw".index(letter)) for letter in new)
            new = f"template {'set' if _is_assigned(tokens, i) else 'get'}<{indices}>()"
        elif new == "threadgroup" and kernel and _declares(tokens, i):
            new = "__shared__ __align__(16)"
        found.append(Token(token.kind, new, token.line, token.spaced))
    return source.minify(found)


def _number(text: str) -> str:
    match = _DECIMAL.match(text)
    if match is None:
        return text + "l" if _WIDE_NUMBER.match(text) else text
    value, suffix = match[1], (match[2] or "f").lower()
    kind = {"f": "", "h": "half", "bf": "bfloat"}[suffix]
    return f"{kind}({value}f)" if kind else f"{value}f"


def _directive(text: str) -> str:
    if match := re.match(r"(#define \w+(?:\([^)]*\))?)(.*)", text):
        return f"{match[1]} {translate(match[2])}"
    return _UNROLL.sub(_unroll, text)


def _unroll(match: re.Match[str]) -> str:
    amount = {"full": "", "enable": "", "disable": " 1"}.get(match[1], f" {match[1]}")
    return f"unroll{amount}"


def _is_member(tokens: list[Token], i: int) -> bool:
    before = "".join(token.text for token in tokens[max(i - 2, 0) : i])
    called = i + 1 < len(tokens) and tokens[i + 1].text == "("
    return not called and (before.endswith(".") or before == "->")


def _is_assigned(tokens: list[Token], i: int) -> bool:
    after = "".join(token.text for token in tokens[i + 1 : i + 4])
    return re.match(r"(?:[-+*/%&|^]|<<|>>)?=(?!=)", after) is not None


def _declares(tokens: list[Token], i: int) -> bool:
    """Whether the ``threadgroup`` at i declares a variable, rather than points to one."""
    angle = 0
    for token in tokens[i + 1 :]:
        text = token.text
        angle += (text == "<") - (text == ">")
        if angle < 0 or (angle == 0 and text in "*&()={}"):
            return False
        if angle == 0 and text in "[;,":
            return True
    return False
