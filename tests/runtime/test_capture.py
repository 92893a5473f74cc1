"""A GPU capture explains why it cannot be made."""

import mlx.core as mx
import pytest

from mlx_qlayers.runtime.capture import capture


@pytest.fixture
def calls(monkeypatch):
    """Pretend that Metal and its capture are there; what is called is listed."""
    calls = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.metal, "start_capture", lambda path: calls.append(("start", path)))
    monkeypatch.setattr(mx.metal, "stop_capture", lambda: calls.append(("stop",)))
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append(("synchronize",)))
    monkeypatch.setenv("MTL_CAPTURE_ENABLED", "1")
    return calls


def test_what_is_inside_is_captured(calls, tmp_path):
    path = tmp_path / "exp.gputrace"
    with capture(path) as given:
        calls.append(("work",))
    assert given == path
    assert calls == [("synchronize",), ("start", str(path)), ("work",), ("synchronize",), ("stop",)]


def test_an_error_inside_ends_the_capture(calls, tmp_path):
    with pytest.raises(ZeroDivisionError), capture(tmp_path / "exp.gputrace"):
        _ = 1 / 0
    assert calls[-1] == ("stop",)


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal_it_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="a GPU capture needs Metal"), capture(tmp_path / "a"):
        pass


@pytest.mark.parametrize(
    ("name", "enabled", "error", "says"),
    [
        ("a.gputrace", "0", RuntimeError, "MTL_CAPTURE_ENABLED=1"),
        ("a.trace", "1", ValueError, "must end in .gputrace"),
        ("taken.gputrace", "1", FileExistsError, "does not overwrite"),
    ],
)
def test_what_cannot_be_captured(name, enabled, error, says, calls, monkeypatch, tmp_path):
    monkeypatch.setenv("MTL_CAPTURE_ENABLED", enabled)
    (tmp_path / "taken.gputrace").mkdir()
    with pytest.raises(error, match=says), capture(tmp_path / name):
        pass
    assert calls == []
