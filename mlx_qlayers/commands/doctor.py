"""Check every kernel on this machine, and print a page for a bug report."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments import positive
from .info import backends, device, versions

if TYPE_CHECKING:
    from .doctor_checks import Check

# Longer than any check takes to compile; one that is not back by then hangs.
_PATIENCE = 60.0
_REPEATS = 3
_HEADER = ("check", "first call", "result", "error", "allowed", "then", "auto takes")


class _Outcome(NamedTuple):
    """What a check showed: a row of the page, and the message of what was wrong."""

    row: tuple[str, ...]
    wrong: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="check only these")
    parser.add_argument("--budget", type=positive, default=50, help="seconds for the checks")


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from ..runtime.backend import backend
    from ..runtime.explain import aligned
    from .doctor_checks import checks, families

    rows = versions() | device() | _gpu() | backends() | {"results": _stored()}
    print("\n".join(aligned([(name, value) for name, value in rows.items()])), end="\n\n")
    path, end = backend(), time.monotonic() + args.budget
    made = [check for check in checks() if not args.only or check.family in args.only]
    if args.only and (unknown := {*args.only} - families() - {"model"}):
        raise ValueError(f"there is no check {', '.join(sorted(unknown))}")
    outcomes, hangs = list[_Outcome](), False
    for check in tqdm([] if path == "ops" else made, disable=None, leave=False):
        outcomes.append(_outcome(check, path, 0.0 if hangs else end))
        hangs = hangs or outcomes[-1].row[2] == "hangs"
    if outcomes:
        print("\n".join(aligned([_HEADER, *(each.row for each in outcomes)])), end="\n\n")
    wrong = [each for each in outcomes if each.wrong]
    for each in wrong:
        print(f"{each.row[0]}: {each.wrong}\n")
    if not hangs and (not args.only or "model" in args.only):
        print(_model(), end="\n\n")
    right = sum(each.row[2] == "right" for each in outcomes)
    print(f"{right} of {len(made)} checks were right" if outcomes else "no kernels run here")
    if wrong:
        sys.stdout.flush()
        if hangs:
            os._exit(1)  # a normal end would wait for the kernel that hangs
        raise SystemExit(1)


def _gpu() -> dict[str, str]:
    """What decides how kernels are launched on an Apple GPU."""
    import mlx.core as mx

    from ..runtime.limits import has_few_registers

    if not mx.metal.is_available():
        return {}
    few = "128 registers a thread" if has_few_registers() else "registers without a limit"
    return {"architecture": f"{mx.device_info().get('architecture')}, {few}"}


def _stored() -> str:
    """How many results there are for this device."""
    from ..dispatch.entries import SHIPPED, file_of, read
    from ..runtime.backend import backend
    from ..tuning.store import listed

    if (name := file_of(backend())) is None:
        return "none"
    own = len(listed(name).get(name, {}))
    return f"{own} measured here, {len(read(SHIPPED, name))} shipped for {name}"


def _outcome(check: Check, path: str, end: float) -> _Outcome:
    """Run a check as asked for, beside the reference on the CPU, and see what auto would take."""
    import mlx.core as mx

    from ..conversion.verify import in_float32, rounding_error
    from ..runtime.backend import use_backend
    from ..runtime.wait import KernelTimeout, wait_for

    if time.monotonic() > end:
        return _Outcome((check.name, "", "not run", "", "", "", ""))
    try:
        with use_backend(path):
            start = time.perf_counter()
            actual: list[Any] = wait_for(check.run, _PATIENCE, *check.arrays)
            first, times = time.perf_counter() - start, list[float]()
            for _ in range(_REPEATS):
                start = time.perf_counter()
                mx.eval(check.run(*check.arrays))
                times.append(time.perf_counter() - start)
        with use_backend("ops"), mx.stream(mx.cpu), _uncompiled():
            expected = check.run(*map(in_float32, check.arrays))
            mx.eval(expected)
            errors = [
                rounding_error(*pair, check.terms, check.steps)
                for pair in zip(actual, expected, strict=True)
            ]
        # NaN is further than any number.
        error, allowed = max(errors, key=lambda e: e[0] / (e[1] or 1) if e[0] <= e[1] else inf)
        taken = _taken(check)
    except Exception as failure:  # whatever is wrong with one kernel, the others are checked
        message = f"{type(failure).__name__}: {failure}"
        if isinstance(failure, KernelTimeout):
            return _Outcome((check.name, "", "hangs", "", "", "", ""), message)
        return _Outcome((check.name, "", "fails", "", "", "", ""), message)
    is_right = error <= allowed
    shown = f"{first:.2f} s", "right" if is_right else "WRONG", f"{error:.1e}", f"{allowed:.1e}"
    wrong = "" if is_right else f"wrong by {error:.3g}, where rounding explains {allowed:.3g}"
    return _Outcome((check.name, *shown, f"{1e6 * min(times):.0f} us", taken), wrong)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Without ``mx.compile``, which on a CPU needs a C++ compiler: many Macs have none."""
    import mlx.core as mx

    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _taken(check: Check) -> str:
    """What auto takes for such arrays, and why."""
    from ..runtime.backend import use_backend
    from ..runtime.explain import recording

    with use_backend("auto"), recording() as rows:
        check.run(*check.arrays)
    keys = [row.key for row in rows if not row.key[0].startswith(("kernel ", "tuning"))]
    return f"{keys[0][1]}: {keys[0][2]}" if keys else ""


def _model() -> str:
    """Convert the model that ships, which measures its shapes here, and say what is taken."""
    from ..conversion.loading import load_stock
    from ..convert import convert_model
    from .demo import shipped_model

    loaded = load_stock(shipped_model())
    start = time.perf_counter()
    report = convert_model(loaded.model, config=loaded.quantization)
    return f"{report.summary()}\nconverted in {time.perf_counter() - start:.1f} s"
