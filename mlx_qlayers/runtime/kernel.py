"""A kernel, declared once and called like a function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from itertools import chain
from typing import Any, Unpack

import mlx.core as mx

from .arena import sharing
from .backend import BackendError, Mode, Outdated, backend, current, epoch, up_to_date
from .declaration import Declaration, KernelError, Multiple
from .devices import device_of
from .explain import note
from .health import WORDS, check_report
from .launch import Bound, Launch, LaunchOptions
from .launch_checks import checked_launch
from .proof import admit
from .spec import Spec
from .tracing import record
from .transformed import is_transformed, without_derivative

__all__ = ["Kernel", "KernelError", "Multiple"]

# Launches of direct calls that are kept.
_KEPT = 512


class Kernel(Declaration):
    """A Metal kernel: where it is written, what it takes and what it needs.

    Nothing is read, compiled or checked before the first call. Names that are given here must be
    those of the Metal function's signature, in the same order; a difference is an error at that
    call. Names that are left out are those of the signature.

    Args:
        name: the kernel's name, unique in the package; errors and traces name it.
        file: the ``.metal`` file, or its text. A ``Path`` that is relative is looked up beside the
            Python file that declares the kernel, then in the working directory; a ``str`` is looked
            up in ``mlx_qlayers/metal`` and ``mlx_qlayers/ops`` before.
        inputs: the names of the inputs, in order.
        outputs: the names of the outputs, in order.
        template: the names of the template's parameters, in order.
        function: the function in the file, if not called ``name``.
        omitted: pointers of the function that this kernel does not pass; they are null in it.
        atomic_outputs: whether the outputs are atomics. MLX then makes every output atomic.
        max_threads: the largest threadgroup that it may be launched with.
        threadgroup_memory: the bytes of threadgroup memory that it takes, or a function that
            returns them for the template's values, passed by name.
        registers: likewise the 32-bit words of the arrays that a thread holds at a time.
        multiples: what the extents of inputs must be multiples of.
        large: whether its offsets have 64 bits, so that arrays of 2^31 elements may be passed.
        ensure_row_contiguous: whether inputs that are not row-contiguous are copied first.
        errors: what the codes 1, 2, ... of its ``health_check`` statements mean.
        folder: where a relative ``file`` is looked up instead of beside that Python file.

    Example:
        >>> exp = Kernel("exp_forward", "exp/exp.metal")
        >>> x = mx.ones(1000)
        >>> (y,) = exp(
        ...     [x],
        ...     template={"T": x.dtype},
        ...     grid=(x.size, 1, 1),
        ...     threadgroup=(256, 1, 1),
        ...     output_shapes=[x.shape],
        ... )
    """

    def __call__(
        self, inputs: Sequence[mx.array], **options: Unpack[LaunchOptions]
    ) -> list[mx.array]:
        """Launch the kernel on the current backend.

        Args:
            inputs: one array for each name in ``inputs``.
            options: ``grid``, ``threadgroup`` and ``output_shapes``, and if need be ``template``,
                ``output_dtypes`` and ``init_value``, as :class:`.launch.LaunchOptions` has them.

        Returns:
            One array for each output.

        Raises:
            KernelError: something does not fit the declaration or the limits of the hardware.
            BackendError: the current backend is ``reference``, or one that cannot run.
        """
        try:
            if not isinstance(inputs, (list, tuple)) or {*map(type, inputs)} - {mx.array}:
                raise TypeError
            specs = tuple([(x.shape, x.dtype) for x in inputs])
            given: Any = options.copy()
            sizes = [given.pop("grid"), given.pop("threadgroup"), *given.pop("output_shapes")]
            values, dtypes = given.pop("template", None) or {}, given.pop("output_dtypes", None)
            # 4.0 equals 4.
            kinds = tuple(map(type, chain(*sizes, values.values(), given.values())))
            call = (tuple(map(tuple, sizes)), tuple(values.items()), dtypes and tuple(dtypes))
            key = specs, *call, tuple(given.items()), kinds, str(given), current.get(), epoch.state
            launch = _kept(self, *key)
        except Outdated as made:
            launch = made.plan
        except (AttributeError, KeyError, TypeError, KernelError):
            # Its message cites the arguments as they are.
            launch = self.bind(inputs, **options)
        return launch(list(inputs))

    def bind(self, inputs: Sequence[mx.array | Spec], **options: Unpack[LaunchOptions]) -> Bound:
        """Check a launch once, for all arrays of these shapes and dtypes, on the current backend.

        Args:
            inputs: arrays, or their shapes and dtypes.
            options: those of a call.

        Returns:
            A function of a list of such arrays that launches and gives a list of outputs. Whoever
            keeps it answers for it that the arrays are such: they are not looked at again, and may
            be replaced in the list by copies. On ``host`` the outputs are constants to ``mx.grad``.

        Raises:
            KernelError: something does not fit the declaration or the limits of the hardware.
            BackendError: the current backend is ``reference``, or one that cannot run.
            Unproven: ``auto`` stands for ``metal``, where nobody has proven this launch.
        """
        name, device = backend(), device_of()
        if not device.kernels:
            raise BackendError(
                f"kernel {self.name} was called, but the reference backend runs none"
            )
        launch = checked_launch(self, name, inputs, **options)
        tell = admit(launch, self.folder) if device.needs_proof else None
        if "health" in epoch.debug:
            launch = self._with_health(launch)
        bind: Callable[[Launch], Bound] = import_module(f".{name}", __package__).bind
        shares = current.get().mode is Mode.INFERENCE and device.launches_views
        run = sharing(launch, bind) if shares else bind(launch)
        traced = partial(record, name, launch) if "trace" in epoch.debug else None
        if tell is not None or traced is not None:
            run = _watched(run, tell, traced)
        if launch.program is self.program:
            return run
        return lambda arrays: check_report(self.name, self.errors, launch.grid, run(arrays))

    def _with_health(self, launch: Launch) -> Launch:
        """The launch with a health buffer, which like all outputs is zero at first."""
        if launch.init_value:
            note(f"kernel {self.name}", "unchecked", f"init_value {launch.init_value} is not 0")
            return launch
        return replace(
            launch,
            program=self.program_with_health,
            output_shapes=[*launch.output_shapes, (WORDS,)],
            output_dtypes=[*launch.output_dtypes, mx.uint32],
            init_value=0.0,
        )


@lru_cache(maxsize=_KEPT)
def _kept(
    kernel: Kernel,
    specs: tuple[tuple[Any, Any], ...],
    sizes: tuple[Any, ...],
    template: tuple[tuple[str, Any], ...],
    dtypes: tuple[Any, ...] | None,
    others: tuple[tuple[str, Any], ...],
    *state: Hashable,
) -> Bound:
    """The launch of direct calls that are alike."""
    bound = kernel.bind(
        [Spec(*spec) for spec in specs],
        grid=sizes[0],
        threadgroup=sizes[1],
        output_shapes=sizes[2:],
        template=dict(template),
        output_dtypes=dtypes,
        **dict(others),
    )
    return up_to_date(bound if device_of().gpu else _guarded(bound), state[-1])


def _guarded(run: Bound) -> Bound:
    """A launch on host, through which no gradient would flow: there it gives constants."""

    def guarded(arrays: list[mx.array]) -> list[mx.array]:
        if arrays and is_transformed(arrays):
            return without_derivative(lambda: run(arrays), arrays)
        return run(arrays)

    return guarded


def _watched(
    run: Bound, before: Callable[[], None] | None, after: Callable[[], None] | None
) -> Bound:
    def watched(arrays: list[mx.array]) -> list[mx.array]:
        if before is not None:
            before()
        outputs = run(arrays)
        if after is not None:
            after()
        return outputs

    return watched
