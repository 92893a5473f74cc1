"""The path of a call: which backend's kernel, or stock operators, and why."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import EllipsisType
from typing import Any, NamedTuple

from ..measurements.thresholds import Measured, threshold
from ..runtime.backend import BackendError, current, requested, unavailable, within
from ..runtime.devices import device_of
from .measurements import Measurement, decided, found


class Choice(NamedTuple):
    """The result of :func:`choose`."""

    op: str  # the operation's public name
    path: str  # the backend; `"reference"` where no kernel runs
    reason: str  # why, for :func:`~mlx_qlayers.explain`
    evidence: str = "rule"  # what decided: a `"rule"`, or what was `"measured"`


# Why ``auto`` takes no kernel for the plan that is being made; "" where it takes one anyhow.
_refusal: ContextVar[str | None] = ContextVar("refusal", default=None)

UNMEASURED = "the kernel was not measured on an Apple GPU"


def unmeasured() -> str | None:
    """Why ``auto`` leaves a kernel that nobody has measured for the reference: on Apple GPUs."""
    return None if device_of().measured else UNMEASURED


def refused(why: str) -> AbstractContextManager[str]:
    """Let ``auto`` choose no kernel in a ``with`` block, or without a reason always one."""
    return within(_refusal, why)


def choose(
    op: str,
    takes: bool = True,
    *,
    empty: str | None = None,
    reason: str | None = None,
    host_gain: float | None = None,
    by: str = "",
    best: Measurement | EllipsisType | None = ...,
    wins: str = "kernel",
) -> Choice:
    """The backend on which ``op`` runs.

    Args:
        takes: whether there is a kernel for these arguments.
        empty: why nothing is computed, whichever backend with a kernel is asked for.
        reason: why ``auto`` should leave the kernel for the reference, or why there is no kernel;
            :class:`Measured` where a threshold decides, for the kernel too.
        host_gain: the measured speedup over the reference on a CPU, by default the number that is
            stored as ``op_gain``. ``auto`` takes the kernel there only if it is above 1.
        by: which of the operation's kernels runs, for the reason.
        best: from :func:`.measurements.found`, which counts before all that; left out for a kernel
            without a record.
        wins: the path by which its record measures the kernel.
    """
    if not isinstance(best, EllipsisType):
        reason, host_gain = decided(best, reason, wins), (best and best.gain) or host_gain
        if best and best.path == wins and isinstance(reason, Measured):
            kernel, also, more = by.partition(";")
            by = f"{kernel or 'its kernel'}, {best.evidence}{also}{more}"
    evidence = "measured" if isinstance(reason, Measured) else "rule"
    wanted, suffix = requested(), f", by {by}" if by else ""
    if wanted not in ("auto", "reference") and not takes:
        why = f": {empty or reason}" if empty or reason else ""
        raise BackendError(f"{op} has no {wanted} kernel for these arguments{why}")
    if empty:
        return Choice(op, "reference", empty)
    if wanted == "reference":
        return Choice(op, "reference", "asked for")
    if wanted != "auto":
        return Choice(op, wanted, "asked for" + suffix)
    if refusal := _refusal.get():
        return Choice(op, "reference", refusal)
    device, invariant = device_of(), current.get().invariant
    name = device.backend
    # Stock operators of a GPU are other ones for other numbers of rows, however fast.
    counts = not (invariant and device.gpu and takes)
    if reason and refusal is None and counts:
        return Choice(op, "reference", reason, evidence)
    if not (takes and device.kernels):
        if takes and (lacks := unavailable("host")):
            return Choice(op, "reference", f"no GPU, and no host backend: {lacks}")
        return Choice(op, "reference", f"no {name} kernel for these arguments")
    if not counts:
        return Choice(op, name, "batch-invariant" + suffix)
    if device.gpu:
        return Choice(op, name, "auto" + suffix, evidence)
    if invariant:
        return Choice(op, name, "batch-invariant" + suffix)
    if current.get().integers and op != "attention":
        return Choice(op, name, "activations in 8 bits" + suffix)
    stored = threshold(f"{op}_gain", device=name) if host_gain is None else host_gain
    if not isinstance(host_gain := stored, (int, float)):
        return Choice(op, "reference", "the kernel was not measured on a CPU")
    if host_gain <= 1:
        reason = f"on a CPU the kernel has {host_gain:.2g} times the speed of MLX's operators"
        return Choice(op, "reference", reason, "measured")
    reason = f"auto: {host_gain:.2g} times the speed of MLX's operators on a CPU"
    return Choice(op, name, reason + suffix, "measured")


def choose_measured(op: str, takes: bool, family: str, *key: Hashable, **rule: Any) -> Choice:
    """As :func:`choose`, by the measurement of an operation's only kernel, else by the ``rule``."""
    best = found(family, *key) if takes else None
    rule["reason"] = unmeasured() or rule.get("reason")
    return choose(op, takes, best=best, **rule)
