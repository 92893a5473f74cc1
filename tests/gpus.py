"""The GPUs that tests run on. Where there is none of a kind, conftest.py leaves its tests out."""

import mlx.core as mx
import pytest

NAMES = ("cuda", "metal")
# Parameters for backends, marked with their names.
GPUS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in NAMES]
on_gpus = pytest.mark.parametrize("gpu", GPUS)


def available(name: str) -> bool:
    """Whether this machine has a GPU of that kind."""
    return bool(getattr(mx, name).is_available())


# For tests that need to run once only: where kernels run on this machine.
HERE = next(filter(available, NAMES), "host")
