"""The GPUs that tests run on. Where there is none of a kind, conftest.py leaves its tests out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_qlayers.metal.attention import forward, records
from mlx_qlayers.metal.attention.layout import Layout, layout, memory
from mlx_qlayers.runtime import cuda, host, metal
from mlx_qlayers.runtime.backend import advance_epoch, use_backend
from mlx_qlayers.runtime.devices import DEVICES
from mlx_qlayers.runtime.devices.record import MAX_THREADGROUP_MEMORY
from mlx_qlayers.runtime.host import checks
from tests.devices import MEMORY_OF_HOST, can_run, has_device

NAMES = ("cuda", "metal")
# Parameters for backends, marked with their names.
GPUS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in NAMES]
on_gpus = pytest.mark.parametrize("gpu", GPUS)


def available(name: str) -> bool:
    """Whether this machine has a GPU of that kind."""
    return bool(getattr(mx, name).is_available())


# For tests that need to run once only: where kernels run on this machine.
HERE = next(filter(available, NAMES), "host")

# Stand-ins for an M1, and for an NVIDIA GPU.
STAND_INS = {"as metal": (metal, DEVICES["metal"]("")), "as cuda": (cuda, DEVICES["cuda"](""))}


def _fitting(kernel: str, device: str, dtype: mx.Dtype, width: int) -> Layout:
    """The layout of attention's tiles on a device, smaller where the host has no room for it."""
    best = layout(kernel, device, dtype, width)
    values = {"T": dtype, "D": width, "DV": width, "ROLES": best.roles, **best.template()}
    of = "forward" if kernel == "packed" else kernel
    if max(memory(of, values, name) for name in ("host", device)) <= MAX_THREADGROUP_MEMORY:
        return best
    smaller = {"tile": best.tile // 2} if best.tile > 16 else {"simds": best.simds // 2}
    return replace(best, **smaller)


@contextmanager
def standing_in(name: str) -> Iterator[None]:
    """The kernels that are chosen for a GPU, as configured there, run on the checked build."""
    module, device = STAND_INS[name]
    kind = device.backend
    with pytest.MonkeyPatch.context() as patch:
        has_device(patch, kind, **vars(device) | MEMORY_OF_HOST)
        can_run(patch, kind)
        patch.setattr(module, "bind", host.bind)
        for user in (forward, records):
            patch.setattr(user, "layout", _fitting)
        advance_epoch()
        with use_backend(kind), checks():
            yield
    advance_epoch()
