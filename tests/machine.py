"""Pretends that a machine has other backends than it has."""

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

import mlx_qlayers.runtime.backend as backend
from mlx_qlayers.dispatch.measurements import entry_of
from mlx_qlayers.measurements import entries, store
from mlx_qlayers.metal.records import RECORDS
from mlx_qlayers.reference.cores import _cores
from mlx_qlayers.runtime import tensor_ops
from mlx_qlayers.runtime.cache_folder import own_folder
from mlx_qlayers.runtime.devices import record
from mlx_qlayers.runtime.proof import trial
from tests import apple_gpu
from tests.devices import can_run

ALL = ("metal", "cuda", "host")


def has_gpu(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Let MLX tell that its GPU is such a one, as ``applegpu_g16s`` or ``sm_90``."""
    monkeypatch.setattr(mx, "device_info", lambda *_: {"architecture": architecture})


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Graphs are made and run as where a GPU is MLX's default device."""
    device = mx.Device(mx.gpu)
    with mock.patch.multiple(mx, default_device=lambda: device, default_stream="of {}".format):
        yield


def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in the password file."""
    for name in ("MLX_QLAYERS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)


def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for a test alone, with this user's compiled kernels, in other processes too."""
    if not (folder / "host").exists():
        (folder / "host").symlink_to(own_folder("host").resolve())
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(folder))


def ships(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the package come with the measurements in a folder."""
    monkeypatch.setattr(record, "FILES", folder)
    monkeypatch.setattr(entries, "SHIPPED", folder)
    record.limits.cache_clear()
    backend.advance_epoch()


def zeros(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
    """In the place of a launch of MLX's custom kernels: zeros."""
    return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]


class Machine:
    """Pretends that a machine has other backends; plans made meanwhile are not used again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self._folder = monkeypatch, folder

    def __call__(self, *names: str) -> None:
        """Exactly these backends can run."""
        for name in ALL:
            can_run(self._patch, name, None if name in names else f"no {name} here")
        backend.advance_epoch()

    def apple(
        self, architecture: str = "applegpu_g17s", system: str = "25.4.0", name: str = "Apple M5"
    ) -> None:
        """A Mac, by default an M5 with macOS 26.4, whose kernels run on the host backend."""
        facts = {"architecture": architecture, "device_name": name, "memory_size": 24 << 30}
        here = os.uname()
        self._patch.setattr(mx.metal, "is_available", lambda: True)
        self._patch.setattr(mx, "device_info", lambda *_: facts)
        self._patch.setattr(os, "uname", lambda: os.uname_result((*here[:2], system, *here[3:])))
        self._patch.setattr(mx.fast, "metal_kernel", apple_gpu.on_host)
        self._measuring()

    def nvidia(self, architecture: str = "sm_90") -> None:
        """An NVIDIA GPU, on which nothing can be launched."""
        self.gpu("cuda", {"architecture": architecture})

    def giving_zeros(self, kind: str) -> None:
        """Kernels of that GPU give zeros, but for those that ask what its compiler has."""
        of_mlx = mx.fast.metal_kernel

        def made(name: str, **given: Any) -> Any:
            return of_mlx(name=name, **given) if name.startswith("defines") else zeros

        self._patch.setattr(mx.fast, f"{kind}_kernel", made)

    def gpu(self, kind: str | None, facts: dict[str, Any]) -> None:
        """A GPU of a kind, or none, of which MLX tells so much."""
        for name in ("metal", "cuda"):
            there = name == kind
            self._patch.setattr(getattr(mx, name), "is_available", lambda there=there: there)
        self._patch.setattr(mx, "device_info", lambda *_: facts)
        self._measuring()

    def cores(self, count: int) -> None:
        """A processor of so many cores."""
        self._patch.setattr(os, "sched_getaffinity", lambda _: range(count), raising=False)
        _cores.cache_clear()

    def threshold(self, device: str, **values: Any) -> None:
        """Values by which rules go were measured here, on the device of a backend."""
        own_cache(self._folder, self._patch)
        found = {name: entries.parsed({"values": value}) for name, value in values.items()}
        store.save(entries.devices(device)[0], found)

    def _measuring(self) -> None:
        own_cache(self._folder, self._patch)
        forget()
        backend.advance_epoch()

    def measured(self, family: str, *key: Any, config: Any = None, **seconds: float) -> None:
        """A problem's paths took so many seconds here, the first was fastest."""
        own_cache(self._folder, self._patch)
        device = backend.backend()
        problem = RECORDS[family](*key)
        config, path = config or problem.heuristic(device), next(iter(seconds))
        name = entries.file_of(device)
        assert name is not None
        store.save(name, {problem.key: entry_of(problem, config, path, seconds)})


def forget() -> None:
    """Let what is remembered of the machine be asked again."""
    for remembered in (entries.device_kind, entries.device_name, tensor_ops._missing, _cores):
        remembered.cache_clear()
    tensor_ops._defines.cache_clear()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Backends that are not there, and what was measured on them."""
    with trial():  # launches that nobody proves, where they are counted and not made
        yield Machine(monkeypatch, tmp_path)
    monkeypatch.undo()
    forget()
    backend.advance_epoch()
