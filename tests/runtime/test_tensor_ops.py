"""Where kernels of tensor operations run, and what is said where they do not."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_qlayers.runtime import tensor_ops


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    tensor_ops.missing.cache_clear()
    yield
    tensor_ops.missing.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "system", "header", "why"),
    [
        ("applegpu_g17s", "26.2", True, None),
        ("applegpu_g18p", "27.0.1", True, None),
        ("applegpu_g17p", "26.2", True, "applegpu_g17p.*generation 18"),
        ("applegpu_g16s", "26.4", True, "applegpu_g16s.*generation 17"),
        ("AMD", "26.4", True, "the GPU is AMD"),
        ("applegpu_g17g", "26.1", True, "macOS is 26.1"),
        ("applegpu_g17g", "26.2", False, "has no <MetalPerformancePrimitives"),
    ],
)
def test_gates(
    gpu: str, system: str, header: bool, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": gpu})
    monkeypatch.setattr(platform, "mac_ver", lambda: (system, (), ""))
    monkeypatch.setattr(tensor_ops, "_has_header", lambda: header)
    found = tensor_ops.missing()
    assert (found is None) == (why is None)
    if why is not None:
        assert re.search(why, str(found))


def test_no_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert tensor_ops.missing() == "there is no Apple GPU"
