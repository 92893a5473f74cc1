"""A launch that is worked out once for all calls that are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from .kernel import Kernel
from .launch import Plan, Size, TemplateValue


class PreparedLaunch:
    """A call of a kernel but for its arrays, which are checked the first time.

    Whoever keeps one answers for it that arrays of later calls have the shapes and dtypes of the
    first: to look at them again takes longer than the launch.

    Args:
        kernel: what is launched.
        template: a value for each template parameter.
        grid: the number of threads in x, y and z.
        threadgroup: the threads of one threadgroup in x, y and z.
        output_shapes: one shape for each output.
        init_value: what outputs are filled with first, or None to leave them unset.
    """

    def __init__(
        self,
        kernel: Kernel,
        template: Mapping[str, TemplateValue],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[Sequence[int]],
        init_value: float | None = None,
    ) -> None:
        self._kernel = kernel
        self._call = grid, threadgroup, output_shapes, template
        self._init_value = init_value
        self._plan: Plan | None = None

    def __call__(self, arrays: list[mx.array]) -> list[mx.array]:
        """Launch the kernel on these inputs."""
        if self._plan is None:
            self._plan = self._kernel.plan(arrays, *self._call)
        return self._kernel.launch(self._plan, arrays, self._init_value)
