"""Proves kernels in another process: a launch that Metal gives up on ends the process it is in.

A call's plan is run on random arrays of its shapes, or of the smallest by which it makes the same
launches, once with its kernels and once in float32 with MLX's operators. The outcome holds for
each of those launches; see :mod:`~mlx_qlayers.runtime.proof`.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..measurements import entries
from ..reference.rounding import behind_one, rounding_error
from ..runtime import proof
from ..runtime.backend import Mode, advance_epoch, current, mode, use_backend, within
from ..runtime.declaration import KernelError
from ..runtime.proof import Launches, Unproven, trial
from ..runtime.spec import Spec
from ..runtime.worker import Worker
from .choice import refused
from .gradients import differentiable, is_float, listed, replaced

# Seconds for a proof, most of them the compiler's; what is not back by then hangs.
_PATIENCE = float(os.environ.get("MLX_QLAYERS_PROOF_SECONDS") or 60)
# Seconds until the first launch is bound.
_START = 60.0
# Elements of a call's arrays from which fewer are looked for.
_MANY = 1 << 20
# Roundings one after the other in an operation: norm, product, activation, product.
_STEPS = 4


class _Job(NamedTuple):
    """A call by its plan: operation, static arguments, specs, and measurements without a file."""

    operation: Any
    static: tuple[Any, ...]
    specs: Sequence[Spec | None]
    mode: Mode
    invariant: bool
    gradient: bool
    measured: tuple[dict[str, Any], dict[str, Any]]


def proven(
    operation: Any, static: tuple[Any, ...], specs: Sequence[Any], call: Any, gradient: bool
) -> Any:
    """Call a function that binds launches, and prove those that have no proof yet.

    It raises Unproven, which was reported, if a launch failed its proof or there can be none.
    """
    tried: set[str] = set()
    while True:
        try:
            return call()
        except Unproven as found:
            if found.why is not None or found.key in tried:
                proof.say(found.kernel, found.why or "its proof cannot be read")
                raise
            tried.add(found.key)
            measured = entries.adopted, entries.unsaved
            now = current.get()
            job = _Job(operation, static, specs, now.mode, now.invariant, gradient, measured)
            _prove(job, found)


def plan_of(operation: Any, static: tuple[Any, ...], specs: Sequence[Any]) -> Any:
    """The plan of a call, without kernels where one of them failed its proof."""

    def plan() -> Any:
        with proof.replacements() as told:
            made = operation.plan(specs, *static)
        if not told or made.choice is None:
            return made
        reason = f"auto, {'; '.join(told)}"
        return made._replace(choice=made.choice._replace(reason=reason, evidence="rule"))

    try:
        return proven(operation, static, specs, plan, False)
    except Unproven as found:
        why = str(found)
    try:
        with refused(why):
            return plan()
    except (Unproven, KernelError):  # it launches kernels whatever was chosen
        with use_backend("reference"):
            return plan()


# The other process, while there is one; one thread at a time has it work.
_prover: Worker | None = None
_lock = threading.Lock()


def _prove(job: _Job, found: Unproven) -> None:
    """Have a job done, and record what came of its launches."""
    launches = {found.key: found.kernel}
    with _lock:
        if proof.find(found.key) is not None:
            return
        try:
            told, why = _told(job)
            if not why and not job.gradient and found.key not in told:
                # It is bound with the others, and launched with gradients only.
                told, why = _told(job._replace(gradient=True))
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
            told, why = {}, f"it cannot be proven: {type(error).__name__}: {error}"
    # Where one before it failed, it is of no use here without that.
    if kept := found.key in told or bool(told and why):
        launches |= told
    elif not why:
        why = "its proof launched other kernels"
    unknown = {name for key, name in launches.items() if proof.find(key) is None}
    if why and len(unknown) > 1:
        why += proof.TOGETHER + ", ".join(sorted(unknown))
    proof.record(launches, why, kept)


def _told(job: _Job) -> tuple[Launches, str]:
    """The launches of a job, and what is wrong with its results, or how its process ended."""
    global _prover
    launches, why = Launches(), ""
    for _ in range(2):  # a process that has had no work ends
        if _prover is None or _prover.process.poll() is not None:
            _prover = Worker(prove, {"MLX_ENABLE_TF32": "0", "MLX_QLAYERS_BACKEND": "auto"})
        try:
            _prover.jobs.send(job)
            patience = _START
            while not isinstance(told := _prover.received(patience), str):
                launches |= [told]
                patience = _PATIENCE
            return launches, told
        except (EOFError, OSError):
            why = _prover.ending()
        if _prover.process.returncode == -9:
            why = f"no result within {_PATIENCE:g} s"
        if launches:
            return launches, why
    return launches, f"it cannot be proven: {why}"


def prove(job: _Job, tell: Callable[[Any], None]) -> None:
    """Do a job: tell the launches as they are made, then what is wrong with the results."""
    entries.adopted, entries.unsaved = job.measured
    advance_epoch()  # results may have been stored since the last job
    try:
        specs, launches = _smaller(job), _Told(tell)
        arrays, why = _arrays(job.operation, job.static, specs), ""
        views = [a if a is None else behind_one(a) for a in arrays]
        mx.eval([a for a in views if a is not None])  # a launch may change arrays in place
        # Nobody sees from outside where in its buffer an array begins.
        for given, which in (arrays, ""), (views, " for arrays that begin inside of their buffers"):
            if not why and (why := _tried(job, specs, given, arrays, launches)):
                why += which
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    tell(why)


def _tried(
    job: _Job, specs: Sequence[Any], given: Sequence[Any], arrays: Sequence[Any], made: Launches
) -> str:
    """Describe how results are wrong, beside the reference of arrays with the same values."""
    actual, of = _launched(job, specs, given, made)
    mx.eval(actual)
    terms = max((n for a in arrays if a is not None for n in a.shape), default=1)
    # Packed arrays have the layout of their dtype.
    expected, besides = _expected(job, arrays, of, actual)
    return _wrong(actual, expected, terms) or _wrong(*besides, terms, len(expected))


class _Told(Launches):
    """Launches that are told when they are made: each may end the process."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell

    def __setitem__(self, key: str, kernel: str) -> None:
        super().__setitem__(key, kernel)
        self.tell((key, kernel))


def _launched(
    job: _Job, specs: Sequence[Any], arrays: Sequence[Any], made: Launches
) -> tuple[list[mx.array], tuple[int, ...]]:
    """A job's results, and of which arrays there are gradients."""
    with trial(made):
        plan = _plan(job, specs)
        gradients = plan.gradients if job.gradient else ()
        of = tuple(sorted(i for gradient in gradients for i in gradient.of))
        return _results(job, plan, arrays, specs, of), of


def _plan(job: _Job, specs: Sequence[Any]) -> Any:
    # A kernel, as whoever asks has chosen one.
    own = within(current, current.get()._replace(invariant=job.invariant))
    with own, mode(job.mode), refused(""):
        return job.operation.plan(specs, *job.static)


def _expected(
    job: _Job, arrays: Sequence[Any], of: tuple[int, ...], actual: list[mx.array]
) -> tuple[list[mx.array], tuple[list[mx.array], list[mx.array]]]:
    """The results by MLX's operators; and what there is besides, by launches and by those."""
    in_float32, besides = all(map(is_float, actual)), job.operation.besides
    exact = [a.astype(mx.float32) if in_float32 and is_float(a) else a for a in arrays]
    specs = [a if a is None else Spec.of(a) for a in exact]
    with use_backend("reference"):
        plan = _plan(job._replace(invariant=False), specs)
        expected = _results(job, plan, exact, specs, of)
        both = ([], []) if of or besides is None else besides(actual, exact, *job.static)
    return expected, both


def _results(
    job: _Job, plan: Any, arrays: Sequence[Any], specs: Sequence[Any], of: tuple[int, ...]
) -> list[mx.array]:
    """A plan's results for arrays, and the gradients of some of them."""
    if not of:
        with mode(Mode.INFERENCE):
            return listed(plan.run(*arrays))
    run = plan.run
    if plan.gradients:
        run = differentiable(job.operation.name, run, plan.gradients, specs)

    def of_some(*some: mx.array) -> list[mx.array]:
        return listed(run(*replaced(arrays, of, some)))[:1]

    with mode(Mode.TRANSFORMED):
        primals = [arrays[i] for i in of]
        # Of numbers that every dtype holds.
        seeds = ((_normal(y.shape, mx.bfloat16, 99), y.dtype) for y in of_some(*primals))
        cotangents = [seed.astype(dtype) for seed, dtype in seeds]
        outputs, gradients = mx.vjp(of_some, primals, cotangents)
    return [*outputs, *gradients]


def _smaller(job: _Job) -> Sequence[Spec | None]:
    """Specs with fewer elements, with the largest axes halved while the launches stay the same."""
    if sum(spec.size for spec in job.specs if spec is not None) <= _MANY:
        return job.specs

    def launches(specs: Sequence[Any]) -> Launches | None:
        zeros = [None if s is None else mx.zeros(s.shape, s.dtype) for s in specs]
        try:
            _launched(job, specs, zeros, made := Launches())
        except Exception:  # whatever does not take such shapes
            return None
        return made

    specs, wanted = job.specs, launches(job.specs)
    for axis in sorted({n for s in specs if s is not None for n in s.shape}, reverse=True):
        for shift in range(axis.bit_length() - 5, 0, -1):
            if axis % (1 << shift):
                continue
            fewer = [
                s and Spec(tuple(axis >> shift if n == axis else n for n in s.shape), s.dtype)
                for s in specs
            ]
            if wanted is not None and launches(fewer) == wanted:
                specs = fewer
                break
    return specs


def _arrays(operation: Any, static: tuple[Any, ...], specs: Sequence[Any]) -> list[Any]:
    """Random arrays of a call; those that mean something are what the operation says."""
    packed = [*map(_is_packed, specs, [*specs[1:], None])]
    # How many matrices indices choose from.
    counts = [s.shape[0] for s, is_matrix in zip(specs, packed, strict=True) if is_matrix and s]
    few = min(counts, default=1)
    arrays: list[Any] = []
    for i, (spec, is_packed) in enumerate(zip(specs, packed, strict=True)):
        if spec is None:
            arrays.append(None)
        elif mx.issubdtype(spec.dtype, mx.floating):
            arrays.append(_normal(spec.shape, spec.dtype, i))
        elif is_packed:
            arrays.append(
                mx.random.randint(0, 1 << 32, spec.shape, mx.uint32, key=mx.random.key(i))
            )
        elif spec.dtype == mx.bool_:
            arrays.append(mx.random.bernoulli(0.7, spec.shape, key=mx.random.key(i)))
        else:
            # Bytes are scales: exponents that stay within range, and no NaN.
            ranges: Any = {mx.uint8: (112, 127), mx.int8: (-127, 128)}
            low, high = ranges.get(spec.dtype, (0, few))
            chosen = mx.random.randint(low, high, (spec.size,), key=mx.random.key(i))
            # Indices may have to be in order.
            chosen = chosen if spec.dtype.size == 1 else mx.sort(chosen)
            arrays.append(chosen.reshape(spec.shape).astype(spec.dtype))
    if operation.sample is not None:
        arrays = operation.sample(arrays, *static)
    mx.eval([a for a in arrays if a is not None])
    return arrays


def _is_packed(spec: Spec | None, scales: Spec | None) -> bool:
    """Whether an array is a quantized matrix, which has its scales behind it."""
    if spec is None or scales is None or spec.dtype != mx.uint32 or spec.ndim < 2:
        return False
    return scales.shape[:-1] == spec.shape[:-1] and scales.shape[-1] < spec.shape[-1]


def _normal(shape: Sequence[int], dtype: mx.Dtype, key: int) -> mx.array:
    return mx.random.normal([*shape], key=mx.random.key(key)).astype(dtype)


def _wrong(
    actual: Sequence[mx.array], expected: Sequence[mx.array], terms: int, first: int = 0
) -> str:
    """Describe how results are wrong; empty if rounding explains the difference."""
    for i, (found, exact) in enumerate(zip(actual, expected, strict=False), first):
        if not is_float(found):
            # Codes of packed rows may fall to the next step.
            if float((found != exact).astype(mx.float32).mean(-1).max()) > 0.25:
                return f"wrong numbers in output {i}"
            continue
        error, allowed = rounding_error(found, exact, terms, _STEPS)
        if not error <= allowed:
            what = "NaN" if error != error else f"wrong numbers, by {error:.2g}"
            return f"{what} in output {i}, where rounding explains {allowed:.2g}"
        # Most numbers are closer than the one that is furthest.
        both = mx.isfinite(found) & mx.isfinite(exact)
        off, of = (
            float(mx.sqrt(mx.where(both, mx.square(each), 0).mean()))
            for each in (found.astype(mx.float32) - exact, exact)
        )
        if float(both.astype(mx.float32).mean()) < 0.5:
            return f"output {i} of its reference is not finite"
        unit = mx.finfo(found.dtype).eps / 2 + 2 * terms**0.5 * mx.finfo(mx.float32).eps
        if off > _STEPS * unit * of:
            return f"wrong numbers, by {off:.2g} of {of:.2g} on average, in output {i}"
    return ""


copyreg.pickle(mx.Dtype, lambda dtype: (_dtype, (str(dtype).removeprefix("mlx.core."),)))


def _dtype(name: str) -> mx.Dtype:
    return cast(mx.Dtype, getattr(mx, "bool_" if name == "bool" else name))
