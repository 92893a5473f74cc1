"""The shape and dtype of an array that is not at hand yet, from which plans are made."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import mlx.core as mx


class Spec(NamedTuple):
    """The shape and dtype of an array, under the names that an array has for them.

    Example:
        >>> Spec((2, 3), mx.float32).size
        6
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @classmethod
    def of(cls, array: mx.array | Spec) -> Spec:
        """That of an array; of a spec itself."""
        return cls(tuple(array.shape), array.dtype)
