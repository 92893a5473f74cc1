"""Check every kernel on this machine, and print a page for a bug report."""

from __future__ import annotations

import argparse
import os
import sys
import time

from .info import backends, device, versions

_HEADER = ("check", "first call", "result", "error", "allowed", "then", "auto takes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="check only these")
    parser.add_argument("--budget", type=int, default=50, help="seconds for the checks")
    parser.add_argument(
        "--one-process", action="store_true", help="check in this process, as a debugger needs it"
    )


def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from ..runtime.backend import backend
    from ..runtime.explain import aligned
    from .doctor_run import MODEL, Outcome, outcomes
    from .examples import families

    rows = versions() | device() | _gpu() | backends() | {"results": _stored(), "proofs": _proofs()}
    print("\n".join(aligned([*rows.items()])), end="\n\n")
    path, end = backend(), time.monotonic() + args.budget
    if unknown := {*args.only} - {*families(), MODEL}:
        raise ValueError(f"there is no check {', '.join(sorted(unknown))}")
    asked = [name for name in (*families(), MODEL) if not args.only or name in args.only]
    made = outcomes(
        [MODEL] * (MODEL in asked) if path == "reference" else asked, path, end, args.one_process
    )
    found = [*tqdm(made, disable=None, leave=False)]
    checked = [each for each in found if isinstance(each, Outcome)]
    if checked:
        print("\n".join(aligned([_HEADER, *(each.row for each in checked)])), end="\n\n")
    wrong = [each for each in checked if each.wrong]
    for each in wrong:
        print(f"{each.row[0]}: {each.wrong}\n")
    for text in found:
        if isinstance(text, str):
            print(text, end="\n\n")
    results = [each.row[2] for each in checked]
    right = f"{results.count('right')} of {len(results)} checks were right"
    print(right if checked else "no kernels run here")
    if wrong:
        sys.stdout.flush()
        if "hangs" in results and args.one_process:
            os._exit(1)  # a normal end would wait for the kernel that hangs
        raise SystemExit(1)


def _gpu() -> dict[str, str]:
    """The facts that decide how kernels are launched on an Apple GPU."""
    import mlx.core as mx

    from ..runtime.devices import device_of

    if not mx.metal.is_available():
        return {}
    few = device_of("metal").few_registers
    registers = "128 registers a thread" if few else "registers without a limit"
    return {"architecture": f"{mx.device_info().get('architecture')}, {registers}"}


def _proofs() -> str:
    """The number of proofs that passed on this Mac, and the reasons of those that failed."""
    from ..runtime.proof import stored

    found = stored().values()
    failed = {each.kernel: each.why for each in found if each.why}
    right = f"{sum(not each.why for each in found)} launches proven"
    return "; ".join([right, *(f"{kernel} failed: {why}" for kernel, why in failed.items())])


def _stored() -> str:
    """How many results there are for this device."""
    from ..measurements.entries import SHIPPED, file_of, read
    from ..measurements.store import listed
    from ..runtime.backend import backend

    if (name := file_of(backend())) is None:
        return "none"
    own = len(listed(name).get(name, {}))
    return f"{own} measured here, {len(read(SHIPPED, name))} shipped for {name}"
