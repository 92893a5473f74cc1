"""Which kernels were proven in this installation: by default a Mac launches no other.

A proof is of a launch's text, its template's values included, and of its threadgroup: it was
compiled, launched on random arrays and compared with the operation's reference. The outcome is
a line of a file that belongs to this version of the package, of MLX and of macOS, and to this GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx

from .backend import advance_epoch, requested, within
from .cache_folder import cache_folder, make_folder
from .explain import note
from .launch import Launch
from .macos import macos_build
from .source import METAL
from .versions import version_of

T = TypeVar("T")
# The words of a reason before the names of several kernels, of which one failed.
TOGETHER = "; launched together: "
# The names of kernels by the keys of their launches.
Launches = dict[str, str]


class Verdict(NamedTuple):
    """The outcome of a kernel's proof: ``why`` says what was wrong, if anything was."""

    kernel: str
    why: str = ""


class Unproven(RuntimeError):
    """A launch that ``auto`` may not make: the dispatcher proves it, or takes stock operators.

    ``why`` says what was wrong when it was tried; None if it was not.
    """

    def __init__(self, kernel: str, key: str, why: str | None) -> None:
        super().__init__(f"kernel {kernel}: {why or 'was not proven on this machine'}")
        self.kernel, self.key, self.why = kernel, key, why


_trial: ContextVar[Launches | None] = ContextVar("trial", default=None)
# Kernels that took another's place; a launch that failed is refused, by trials too.
_instead: ContextVar[list[str] | None] = ContextVar("instead", default=None)
_has_another: ContextVar[bool] = ContextVar("has_another", default=False)
_lock = threading.Lock()
# By the file that they are stored in, which is another one where the cache's folder is.
_verdicts: dict[Path, dict[str, Verdict]] = {}
# Verdicts that could not be written, or that nobody can find out in this process.
_unkept: dict[str, Verdict] = {}


def admit(launch: Launch, folder: Path | None) -> Callable[[], None] | None:
    """Let a launch on Metal pass that was proven or forced, or is a trial, else raise Unproven.

    Returns:
        The function that a trial calls at the launch: a kernel that is only bound proves nothing.
    """
    trial = _trial.get()
    if trial is None and (requested() != "auto" or METAL.parent not in (folder or Path()).parents):
        return None
    key, kernel = key_of(launch), launch.program.name
    verdict = find(key) if trial is None or _has_another.get() else None
    if (trial is None and verdict is None) or (verdict is not None and verdict.why):
        raise Unproven(kernel, key, verdict and verdict.why)
    return None if trial is None else partial(trial.__setitem__, key, kernel)


def first_proven(variants: Mapping[str, Callable[[], T]]) -> T:
    """The result of the first of some functions, none of whose launches has failed its proof.

    The last one's is taken in any case. It raises Unproven for a launch that nobody has tried.
    """
    names, failed = list(variants), ""
    for name, following in zip(names, [*names[1:], ""], strict=True):
        try:
            with within(_has_another, bool(following) or _has_another.get()):
                made = variants[name]()
        except Unproven as found:
            if found.why is None or not following:
                raise
            if _trial.get() is None:
                say(found.kernel, found.why, following)
            failed += f"; not {name}, as kernel {found.kernel} gave {found.why}"
        else:
            if failed and (told := _instead.get()) is not None:
                told.append(f"by {name}{failed}")
            return made
    raise ValueError("no variants")


def replacements() -> AbstractContextManager[list[str]]:
    """Collect what :func:`first_proven` takes in the place of something else, and why not that."""
    return within(_instead, [])


def trial(launches: Launches | None = None) -> AbstractContextManager[Launches]:
    """Admit every launch that is bound in a ``with`` block, in this thread or task, and note it."""
    return within(_trial, {} if launches is None else launches)


def key_of(launch: Launch) -> str:
    """The key under which a launch's proof is stored."""
    text = f"{launch.threadgroup}\0{launch.text}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def find(key: str) -> Verdict | None:
    """The outcome of a launch's proof; None where there was none."""
    if (found := _unkept.get(key)) is not None:
        return found
    try:
        path = file()
    except OSError:
        return None
    with _lock:
        if key not in _verdicts.get(path, {}):  # another process may have proven it meanwhile
            _verdicts[path] = read(path)
        return _verdicts[path].get(key)


def record(launches: Mapping[str, str], why: str = "", kept: bool = True) -> None:
    """Keep the verdict on launches of a :func:`trial`, for other processes too if ``kept``."""
    found = {key: Verdict(name, why) for key, name in launches.items() if find(key) is None}
    if not found:
        return
    lines = (json.dumps({"key": key, **verdict._asdict()}) for key, verdict in found.items())
    try:
        if not kept:
            raise OSError("it holds for this process alone")
        make_folder((path := file()).parent)
        # One write, so that processes do not come between each other's lines.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        with os.fdopen(handle, "wb", buffering=0) as stored:
            stored.write("".join(f"\n{line}\n" for line in lines).encode())
    except OSError as error:
        note("proof", "not kept", str(error))
        _unkept.update(found)
    for kernel in dict.fromkeys(verdict.kernel for verdict in found.values()):
        note(f"kernel {kernel}", "failed" if why else "proven", why or "as its reference")
    if why:
        advance_epoch()  # plans were made that count on it


def failed(kernel: str) -> str | None:
    """Why a launch of a kernel, or of one whose name begins so, failed its proof, if one did."""
    every = [*stored().values(), *_unkept.values()]
    return next((v.why for v in every if v.why and v.kernel.startswith(kernel)), None)


def stored() -> Mapping[str, Verdict]:
    """All that is kept for this installation."""
    try:
        return read(file())
    except OSError:
        return {}


def read(path: Path) -> dict[str, Verdict]:
    """The verdicts of a file; lines that cannot be understood are left out."""
    found = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    for line in filter(None, text.splitlines()):
        try:
            entry = json.loads(line)
            key, *verdict = (entry[name] for name in ("key", "kernel", "why"))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if all(isinstance(each, str) for each in (key, *verdict)):
            found[key] = Verdict(*verdict)
    return found


# Kernels that were warned of.
_said: set[str] = set()


def say(kernel: str, why: str, instead: str = "MLX's own operators") -> None:
    """Warn once in a process of a kernel that is left for something else, and those beside it."""
    names = {kernel, *filter(None, why.partition(TOGETHER)[2].split(", "))}
    if not names <= _said:
        _said.update(names)
        text = f"mlx-qlayers: warning: kernel {kernel} is left for {instead}: {why}"
        print(text, file=sys.stderr)


def file() -> Path:
    """Where verdicts of this installation are."""
    return cache_folder() / "proofs" / f"{_installation()}.jsonl"


@cache
def _installation() -> str:
    """The GPU's name and, hashed, whatever else may change what a kernel does."""
    gpu = mx.device_info(mx.gpu) or mx.device_info()
    name = re.sub(r"\W+", "-", str(gpu.get("device_name") or gpu.get("architecture") or "gpu"))
    facts = (
        version_of("mlx-qlayers"),
        version_of("mlx"),
        macos_build(),
        str(gpu.get("architecture")),
    )
    return f"{name}-{hashlib.sha256(str(facts).encode()).hexdigest()[:12]}"
