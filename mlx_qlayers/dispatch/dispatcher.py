"""Calls of operations: a key to a plan that is made once and then called.

The key holds all that a plan may depend on: the operation, its static arguments, the shapes and
dtypes of its arrays, backend and mode of the thread or task, stream, debug modes, and an epoch that
moves when measured results change. Plans are kept in one bounded, thread-safe cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import NoneType
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..runtime.backend import (
    BackendError,
    Mode,
    Outdated,
    ToolchainError,
    current,
    epoch,
    falls_back,
    mode,
    requested,
    up_to_date,
)
from ..runtime.declaration import KernelError
from ..runtime.devices import device_of
from ..runtime.explain import Row, collectors, count, note, recording, recount, row
from ..runtime.launch import taking
from ..runtime.proof import Unproven
from ..runtime.spec import Spec
from ..runtime.threads import here
from ..runtime.transformed import has_values
from .choice import Choice
from .gradients import Gradient, Outputs, differentiable, gradient_of
from .mapped import Batched, run_mapped, wrap_vmap
from .measurements import by_heuristics, uncollected
from .prover import plan_of, proven

# A server sees prompts of any length: what has not been asked for lately is made again.
MAX_PLANS = 4096
# Of one operation, by shapes, in front of that cache.
MAX_RECENT = 64

wrap_vmap()


class Plan(NamedTuple):
    """An operation's plan for a key."""

    choice: Choice | None  # the path, and why
    run: Callable[..., Any]  # from the arrays; launches on that path, or the reference
    gradients: Sequence[Gradient] = ()  # of `run`; MLX knows those of the reference
    reference: Callable[..., Any] | None = None  # for arrays without values on `host`


def either(
    choice: Choice,
    composed: Callable[..., Any],
    arrays: Sequence[Any],
    bind: Callable[[], Callable[..., Any]],
) -> Plan:
    """A plan by a choice: MLX's operators, or a launch with the gradient of those."""
    if choice.path == "reference":
        return Plan(choice, composed)
    return Plan(choice, bind(), gradient_of(composed, arrays), composed)


@dataclass(eq=False, slots=True)
class Operation:
    """An operation that is dispatched.

    Args:
        name: its public name.
        plan: from the specs of its arrays and its static arguments to a :class:`Plan`. It checks
            them, and raises a ``ValueError`` that names the argument and its value.
        compiled: whether a call from Python that only evaluates replays a graph on a GPU, which
            ``mx.compile`` traced when the plan was made.
        sample: from a list of random arrays and the static arguments to those that a proof is made
            with, where numbers of any kind would mean nothing.
        besides: from what launches give, arrays and the static arguments to two lists: of what else
            than the results is in it, and the same in MLX's operators.
        batched: from arrays and the axes that ``mx.vmap`` maps of them to whether one call does for
            all, of which these are the first axes.

    Example:
        >>> from mlx_qlayers.dispatch import Operation, Plan, choose, dispatch
        >>> def plan(specs):
        ...     return Plan(choose("twice", False), lambda x: 2 * x)
        >>> dispatch(Operation("twice", plan), (mx.array(3.0),)).item()
        6.0
    """

    name: str
    plan: Callable[..., Plan]
    compiled: bool = False
    sample: Callable[..., list[Any]] | None = None
    besides: Callable[..., tuple[list[mx.array], list[mx.array]]] | None = None
    batched: Batched | None = None
    # By shapes, the last plan and the rest of its key: half of what the whole key's hash costs.
    recent: dict[Any, tuple[tuple[Any, ...], _Prepared]] = field(default_factory=dict, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.name, self.plan, self.compiled, self.sample, self.besides, self.batched
        return type(self), fields


class _Prepared(NamedTuple):
    """A plan that is ready to be called, and what each call counts."""

    run: Callable[..., Any]
    rows: tuple[Row, ...]


_NONE: Any = (None, None)


def dispatch(
    operation: Operation, arrays: tuple[mx.array | None, ...], static: tuple[Hashable, ...] = ()
) -> Any:
    """Run an operation by the plan for its key, which is made if there is none.

    Raises:
        ValueError: an argument does not fit; it is named.
        BackendError: a backend was forced that cannot run this.
    """
    shapes = dtypes = ()  # type: tuple[Any, ...]
    try:
        for a in arrays:
            shapes += (None if a is None else a.shape,)
            dtypes += (None if a is None else a.dtype,)
        now, thread, device = current.get(), here.number, mx.default_device()
        # Only graphs belong to a stream and its thread, and on a GPU there are none inside others.
        inside = now.mode is Mode.INFERENCE and device_of().gpu
        key = (
            tuple(map(type, static)),  # 4.0 equals 4
            static,
            dtypes,
            now,
            epoch.state,
            None if inside else thread,
            mx.default_stream(device) if operation.compiled and not inside else device,
        )
        last, prepared = operation.recent.get(shapes, _NONE)
        if last != key:
            prepared = _made(operation, shapes, key)
    except Outdated as made:
        prepared = made.plan
    except (AttributeError, TypeError):
        prepared = _unkeyed(operation, arrays, static)
    if collectors:
        count(prepared.rows)
    else:
        for each in prepared.rows:
            next(each.ticks)
    try:
        return prepared.run(*arrays)
    except ToolchainError as error:
        if not falls_back(error):
            raise
    return dispatch(operation, arrays, static)


def planned(
    operation: Operation, arrays: tuple[mx.array | None, ...], static: tuple[Hashable, ...] = ()
) -> tuple[Callable[..., Any], tuple[Row, ...]] | None:
    """The function that :func:`dispatch` ran last for such arrays, and the rows that callers count.

    It is valid in this context and epoch; None if the plan is another's by now, or not kept.
    """
    shapes = tuple(None if a is None else a.shape for a in arrays)
    dtypes = tuple(None if a is None else a.dtype for a in arrays)
    key, prepared = operation.recent.get(shapes, _NONE)
    if key is None or key[1:5] != (static, dtypes, current.get(), epoch.state):
        return None
    return prepared.run, prepared.rows


def _made(operation: Operation, shapes: tuple[Any, ...], key: tuple[Any, ...]) -> _Prepared:
    prepared = _plan(operation, shapes, *key[:-1], str(key[-1]))
    if len(operation.recent) >= MAX_RECENT:
        operation.recent.clear()
    operation.recent[shapes] = key, prepared
    return prepared


def _unkeyed(operation: Operation, arrays: Sequence[Any], static: tuple[Any, ...]) -> _Prepared:
    """The plan of arguments that cannot be a key; mostly the checks say what is wrong with them."""
    strange = any(not isinstance(a, mx.array) for a in arrays if a is not None)
    cause: Exception | None = None
    specs = [Spec.of(a) if isinstance(a, mx.array) else a for a in arrays]
    try:
        prepared = _prepare(operation, static, specs)
        if not strange:
            return prepared
    except (AttributeError, TypeError, ValueError) as error:
        ours = isinstance(error, ValueError) and not str(error).startswith("[")  # as MLX's do
        if ours or not (strange or "NoneType" in str(error)):
            raise
        cause = error
    given = ", ".join("None" if a is None else type(a).__name__ for a in arrays)
    raise TypeError(f"{operation.name} takes arrays of MLX, not ({given})") from cause


@lru_cache(maxsize=MAX_PLANS)
def _plan(
    operation: Operation,
    shapes: tuple[Any, ...],
    types: tuple[type, ...],
    static: tuple[Any, ...],
    dtypes: tuple[Any, ...],
    context: object,
    state: object,
    thread: int | None,
    place: str,
) -> _Prepared:
    if not {*map(type, dtypes)} <= {mx.Dtype, NoneType}:
        raise TypeError("arrays of others are no key")
    given = zip(shapes, dtypes, strict=True)
    specs = [None if dtype is None else Spec(shape, dtype) for shape, dtype in given]
    return up_to_date(_prepare(operation, static, specs), state)


def _prepare(operation: Operation, static: tuple[Any, ...], specs: Sequence[Any]) -> _Prepared:
    now = current.get().mode
    if now is Mode.EAGER and operation.compiled and _can_compile():
        return _compiled(operation, static, specs)
    if now is Mode.MAPPED:
        with mode(Mode.TRANSFORMED):
            _planned(operation, static, specs)  # for its checks

        def again(*arrays: Any) -> Any:
            return dispatch(operation, arrays, static)

        return _Prepared(partial(run_mapped, operation.name, again, operation.batched), ())
    plan = _planned(operation, static, specs)
    rows = _row(plan.choice)
    device = device_of(plan.choice and plan.choice.path)
    run = plan.run
    if plan.gradients and now.differentiable:
        if device_of().launches_at_once and now is Mode.EAGER:
            return _Prepared(_guarded(operation, static, specs, plan, rows), ())
        gradients = plan.gradients
        # Its compiler may not be there, or a proof fails.
        if device.launches_at_once or device.needs_proof:
            gradients = _with_fallback(operation, static, specs, plan)
        run = differentiable(operation.name, run, gradients, specs)
    if plan.choice is not None and device.launches_at_once and now is not Mode.INFERENCE:
        return _Prepared(_with_values(operation, plan, run, rows), ())
    return _Prepared(run, rows)


def _planned(operation: Operation, static: tuple[Any, ...], specs: Sequence[Any]) -> Plan:
    """The plan, by heuristics where somebody wrote a configuration that no kernel takes."""
    try:
        return plan_of(operation, static, specs)
    except (KernelError, ArithmeticError, TypeError) as error:
        with by_heuristics():
            plan = plan_of(operation, static, specs)
        note("tuning", "ignored", f"{operation.name}: {error}")
        return plan


def _with_fallback(
    operation: Operation, static: tuple[Any, ...], specs: Sequence[Any], plan: Plan
) -> list[Gradient]:
    """The gradients, by autodiff of the reference where their kernels fail."""

    def fallible(gradient: Gradient) -> Gradient:
        def compute(given: Any, *rest: list[mx.array]) -> Sequence[mx.array]:
            def call() -> Sequence[mx.array]:
                return gradient.compute(given, *rest)

            try:
                return cast(Sequence[mx.array], proven(operation, static, specs, call, True))
            except (ToolchainError, Unproven) as error:
                fails = isinstance(error, ToolchainError) and not falls_back(error)
                if plan.reference is None or fails:
                    raise
            (whole,) = gradient_of(plan.reference, given)
            made = dict(zip(whole.of, whole.compute(given, *rest), strict=True))
            return [made[i] for i in gradient.of]

        return gradient._replace(compute=compute)

    return [fallible(gradient) for gradient in plan.gradients]


def _row(choice: Choice | None) -> tuple[Row, ...]:
    return () if choice is None else (row(*choice),)


def _guarded(
    operation: Operation,
    static: tuple[Any, ...],
    specs: Sequence[Any],
    plan: Plan,
    rows: tuple[Row, ...],
) -> Callable[..., Any]:
    """On a CPU: the launch where it is only evaluated, else the plan for transformations."""
    run, there = plan.run, taking([i for i, spec in enumerate(specs) if spec is not None])
    evaluate, depends = mx.async_eval, mx.depends

    # As is_transformed does, and count: on a CPU, calls of Python functions are a call's cost.
    def guarded(*arrays: Any) -> Any:
        given = there(arrays)
        try:
            evaluate(*depends(given[:1], given))
        except ValueError:
            with mode(Mode.TRANSFORMED):
                return dispatch(operation, arrays, static)
        if collectors:
            count(rows)
        else:
            for each in rows:
                next(each.ticks)
        return run(*arrays)

    return guarded


def _with_values(
    operation: Operation, plan: Plan, run: Callable[..., Any], rows: tuple[Row, ...]
) -> Callable[..., Any]:
    """On ``host``: the launch where the arrays have values, else the reference."""
    reference, forced = plan.reference, requested() != "auto"
    traced = "mx.compile or mx.vmap is tracing the inputs, and the host backend needs their values"

    def checked(*arrays: Any) -> Any:
        if has_values([a for a in arrays if a is not None]):
            count(rows)
            return run(*arrays)
        if forced or reference is None:
            raise BackendError(f"{operation.name}: {traced}")
        count((row(operation.name, "reference", traced),))
        with uncollected():
            return reference(*arrays)

    return checked


def _can_compile() -> bool:
    """Whether a graph may be replayed: on a GPU, where no debug mode wants to see its launches."""
    if epoch.debug or device_of().launches_at_once:
        return False
    return mx.default_device().type == mx.gpu


def _compiled(operation: Operation, static: tuple[Any, ...], specs: Sequence[Any]) -> _Prepared:
    """The operation as a graph that is traced now, on arrays that are never evaluated.

    MLX runs the function anew where it is differentiated or traced: then nodes that carry gradients
    are needed, which cost as much to evaluate as a launch.
    """
    with mode(Mode.COMPILED):
        plan = _planned(operation, static, specs)
    ahead = True

    def function(*arrays: Any) -> Outputs:
        if ahead:
            with mode(Mode.INFERENCE):
                return plan.run(*arrays)
        with mode(Mode.TRANSFORMED), recording() as instead:
            outputs = dispatch(operation, arrays, static)
        recount(rows, instead)
        return outputs

    run = mx.compile(function)
    with recording() as nested:
        run(*[None if s is None else mx.zeros(s.shape, s.dtype) for s in specs])
    ahead, rows = False, (*_row(plan.choice), *nested)
    return _Prepared(run, rows)
