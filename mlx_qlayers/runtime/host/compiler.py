"""From Metal source to a loaded function: preprocess, translate, compile strictly, check, build.

Most of a translation unit is the headers in front of the kernel, the same for all kernels: they
are translated and parsed once, into a precompiled header in the cache.
"""

from __future__ import annotations

import functools
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from . import cache, toolchain
from . import llvm_ir as ir
from . import translate as source
from .access_checks import instrument
from .errors import CompileError

# Half of a fiber's stack (fiber.h): a frame beyond that would end the process at a guard page.
_FRAME = 128 * 1024
_WARNINGS = (
    "-ferror-limit=8",
    "-Wno-everything",
    "-Wimplicit-float-conversion",
    f"-Wframe-larger-than={_FRAME}",
    "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized",
    "-Werror=return-type",
    "-Werror=array-bounds",
    "-Werror=infinite-recursion",
    "-Werror=shift-count-overflow",
    "-Werror=division-by-zero",
)
# bfloat widens by itself and never narrows: what clang only warns about, Metal refuses.
_NARROWING = re.compile(r"^.*loses floating-point precision: .* to 'bfloat'.*$", re.M)
_FIBERS = re.compile(
    r"@qk_(?:simd_sync|threadgroup_barrier|simdgroup_barrier|threadgroup_memory|tensor_\w+)\("
)

_LINE_MARKER = re.compile(r"^# \d+ .*\n", re.M)
_OWN_LINE = re.compile(r'# \d+ "source\.metal"')
_RETURN = re.compile(r'\A(# \d+ "source\.metal") 2')
# Placeholders for the name of a kernel and its template arguments in a text that others share.
_NAME, _ARGUMENTS = "qk_name", "qk_arguments"


class Preamble(NamedTuple):
    """The headers in front of a kernel, translated and parsed."""

    header: Path
    declared: source.Declared


class Compiled(NamedTuple):
    """A kernel as built."""

    library: Path
    signature: source.Signature
    fibers: bool  # whether its threads meet at barriers, so that each needs a stack of its own
    granule: int  # the bytes of its smallest store
    lines: list[str]  # the source lines that its hooks name by their index


def preprocess(text: str, defines: Mapping[str, str], language: int) -> str:
    """The translation unit of Metal source, MLX's installed headers and the library expanded."""
    folders = [f"-I{toolchain.SHIMS}", f"-I{toolchain.mlx_include()}"]
    macros = {"__METAL__": "1", "__METAL_VERSION__": str(language), **defines}
    flags = [*toolchain.LANGUAGE, *toolchain.target(), *folders]
    flags += [f"-D{k}={v}" for k, v in macros.items()]
    unit = f'#include "entry.h"\n#line 1 "source.metal"\n{text}\n'
    return toolchain.run(["clang", "-E", *flags, "-"], unit)[0]


def split(unit: str) -> tuple[str, str]:
    """A preprocessed unit in two: the headers that it includes first, and its own text."""
    end = 0
    markers = list(_LINE_MARKER.finditer(unit))
    for marker, following in zip(markers, [*markers[1:], None], strict=True):
        if _OWN_LINE.match(marker.group()):
            end = marker.start()
            if unit[marker.end() : following.start() if following else None].strip():
                break
    # The line that returns from the last header begins a text here.
    return unit[:end], _RETURN.sub(r"\1", unit[end:], count=1)


def _shared(text: str, function: str) -> tuple[str, str, Callable[[str], str]]:
    """The text and name that instances of a kernel share, and what makes them this instance's."""
    found = {*re.findall(rf"\b{function}<([^<>;]*)>", text)} if function.isidentifier() else set()
    if len(found) != 1:
        return text, function, str
    (arguments,) = found
    text = text.replace(f"{function}<{arguments}>", f"{function}<{_ARGUMENTS}>")

    def own(text: str) -> str:
        return text.replace(_ARGUMENTS, arguments).replace(_NAME, function)

    return re.sub(rf"\b{function}\b", _NAME, text), _NAME, own


def precompile(headers: str, constants: Mapping[int, object], *, checked: bool) -> Preamble:
    """Translate and parse the preprocessed headers of a kernel, or take them from the cache."""

    def make(folder: Path) -> None:
        text, declared = source.rewrite(headers, constants)
        # Templates that the headers use are instantiated here once, and not in each kernel.
        made = ["-fpch-instantiate-templates", "-c", "-Xclang", "-emit-pch"]
        header = folder / "headers.pch"
        _parse(text, made, checked=checked, debug=checked, output=header)
        (folder / "declared").write_bytes(pickle.dumps(declared))

    used = sorted(constants.items()) if "function_constant" in headers else []
    folder = cache.entry(toolchain.key("headers", headers, used, checked), make)
    return Preamble(folder / "headers.pch", pickle.loads((folder / "declared").read_bytes()))


@functools.lru_cache(maxsize=64)
def _translated(
    text: str,
    function: str,
    constants: frozenset[tuple[int, object]],
    defines: frozenset[tuple[str, str]],
    language: int,
    checked: bool,
) -> tuple[str, str, source.Signature]:
    """The headers of a source as preprocessed, the unit behind them for clang, and its kernel."""
    headers, own = split(preprocess(text, dict(defines), language))
    values = dict(constants)
    preamble = precompile(headers, values, checked=checked)
    return sys.intern(headers), *source.translate(own, function, values, preamble.declared)


def _parse(
    unit: str, arguments: list[str], *, checked: bool, debug: bool, output: Path | None = None
) -> str:
    flags = ["-gline-tables-only"] if debug else []
    if checked:
        flags += ["-fno-finite-loops", "-fsanitize=array-bounds,integer-divide-by-zero"]
    spaces = ["-Xclang", "-ffake-address-space-map"]
    passes = ["-O3", "-Xclang", "-disable-llvm-passes", "-fPIC"]
    command = ["clang", *toolchain.LANGUAGE, *toolchain.target(), *_WARNINGS, *flags, *spaces]
    printed, said = toolchain.run([*command, *passes, *arguments, "-"], unit, output)
    if narrowing := [x for x in _NARROWING.findall(said) if "mlx/backend" not in x]:
        raise CompileError("\n".join(x.replace("warning:", "error:") for x in narrowing))
    return printed


def strict(unit: str, *, checked: bool, debug: bool, preamble: Preamble | None = None) -> str:
    """The IR of a translation unit before any optimisation, address spaces apart."""
    include = ["-Xclang", "-include-pch", "-Xclang", str(preamble.header)] if preamble else []
    emit = [*include, "-S", "-emit-llvm", "-o", "-"]
    return _parse(unit, emit, checked=checked, debug=debug)


def _refuse(unit: str, text: str, checked: bool, preamble: Preamble) -> None:
    """Report what :func:`ir.check` finds, with source lines."""
    try:
        ir.check(text)
    except CompileError:
        debug = strict(unit, checked=checked, debug=True, preamble=preamble)
        ir.check(debug, ir.Locations(debug, str(toolchain.SHIMS)).of)
        raise


def _object(text: str, folder: Path, *flags: str) -> None:
    flags = ("-x", "ir", *toolchain.target(), *flags, "-Werror=frame-larger-than", "-fPIC", "-c")
    toolchain.run(["clang", *flags, "-"], text, folder / "kernel.o")


def object_fast(text: str, folder: Path) -> tuple[int, list[str]]:
    """Write ``kernel.o``, as fast as this machine can run it."""
    _object(ir.collapse(ir.unalign(text), all_spaces=True), folder, "-O3")
    return 4, []


def optimise(text: str) -> str:
    """The IR as the checked build sees it: optimised, but every access still one of a thread."""
    plain = ["-O1", "-fno-vectorize", "-fno-slp-vectorize", "-S", "-emit-llvm", "-o", "-", "-"]
    collapsed = ir.collapse(text, all_spaces=False)
    return toolchain.run(["clang", "-x", "ir", *toolchain.target(), *plain], collapsed)[0]


def object_checked(text: str, folder: Path) -> tuple[int, list[str]]:
    """Write ``kernel.o`` with hooks; its smallest store in bytes and the lines of its hooks."""
    optimised = optimise(text)
    hooked = instrument(optimised, ir.Locations(optimised, str(toolchain.SHIMS)).of)
    # To choose instructions well takes longer than a test runs, but on a stack less room.
    for level in ("-O0", "-O1"):
        try:
            _object(hooked.ir, folder, level, "-Xclang", "-disable-llvm-passes")
            break
        except CompileError as error:
            if level == "-O1" or "stack frame size" not in str(error):
                raise
    return hooked.smallest_store, hooked.lines


def build(
    text: str,
    function: str,
    checked: bool,
    constants: Mapping[int, object],
    defines: Mapping[str, str],
    language: int,
    first: Callable[[str], None] | None,
) -> Compiled:
    """Compile one kernel as :func:`~.compiled_kernel.compile_source`, or take it from the cache."""
    if checked:
        defines = {**defines, "QK_CHECKED": "1"}

    def make(folder: Path) -> None:
        shared, name, own = _shared(text, function)
        if first:
            first(shared)
        given = frozenset(constants.items()), frozenset(defines.items()), language, checked
        headers, unit, signature = _translated(shared, name, *given)
        preamble = precompile(headers, constants, checked=checked)
        unit = own(unit)
        signature = replace(signature, expression=own(signature.expression))
        plain = strict(unit, checked=checked, debug=checked, preamble=preamble)
        _refuse(unit, plain, checked, preamble)
        granule, lines = (object_checked if checked else object_fast)(plain, folder)
        toolchain.link([folder / "kernel.o"], folder / "kernel.so")
        (folder / "kernel.o").unlink()
        facts = signature, checked or bool(_FIBERS.search(plain)), granule, lines
        (folder / "facts").write_bytes(pickle.dumps(facts))

    described = text, function, checked, sorted(constants.items()), dict(defines), language
    folder = cache.entry(toolchain.key("kernel", *described), make)
    return Compiled(folder / "kernel.so", *pickle.loads((folder / "facts").read_bytes()))
