"""What the tuner found, one JSON file for each device: written atomically, trusted with care.

An entry counts only for the very kernel, MLX and device that it was measured with. Results that
come with the package are in ``results/``; the user's own, in the cache folder, come first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from ..runtime.cache_folder import cache_folder
from ..runtime.explain import note
from ..runtime.kernel import Kernel

C = TypeVar("C")
_SHIPPED = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Entry:
    """The result of tuning one kernel for one problem on one device.

    Attributes:
        config: the fields of the kernel's fastest configuration.
        path: ``"kernel"``; the path that was faster, such as ``"stock"``; or ``"modelled"``.
        seconds: what that path takes.
        heuristic: what the kernel takes with the configuration that it has without tuning.
        tried: how many configurations were tried.
        source: the kernel's text, hashed.
        mlx: the version of MLX.
    """

    config: Mapping[str, int | str]
    path: str
    seconds: float
    heuristic: float
    tried: int
    source: str
    mlx: str


@cache
def device_kind() -> str | None:
    """The backend of this machine's GPU: ``"metal"``, ``"cuda"``, or None without one."""
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


@cache
def device_name() -> str:
    """The architecture of MLX's GPU, else ``"cpu"``; the name of the results' file."""
    if device_kind():
        facts = mx.device_info()
        return str(facts.get("architecture") or facts.get("device_name", "gpu")).replace(" ", "_")
    return "cpu"


@cache
def source_hash(*kernels: Kernel) -> str:
    """What changes when the text of a kernel does."""
    text = "\0".join(k.program.header + k.program.source for k in kernels)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def stored(
    key: str, configs: tuple[type[C], ...], kernels: tuple[Kernel, ...], device: str
) -> tuple[str, C] | None:
    """The fastest path for a problem and the kernel's fastest configuration; None where none is
    stored that can be trusted.

    The first call for a key reads files, the others take well under a microsecond.

    Args:
        key: from :func:`key_of`.
        configs: the classes that the configuration may be of; its fields tell which.
        kernels: those that it configures.
        device: from :func:`device_name`.
    """
    entry = entries(device).get(key)
    if entry is None:
        return None
    try:
        return entry.path, _checked(entry, configs, kernels)(**entry.config)
    except (ValueError, TypeError) as error:
        note("tuning", "ignored", f"{key}: {error}")
        return None


def key_of(family: str, shape: tuple[int, ...], dtype: mx.Dtype, form: str = "") -> str:
    """The key of a problem.

    Example:
        >>> key_of("row_sum", (64, 1024), mx.float16)
        'row_sum 64x1024 float16'
    """
    name = str(dtype).removeprefix("mlx.core.")
    return " ".join(filter(None, (family, "x".join(map(str, shape)), name, form)))


def save(device: str, found: Mapping[str, Entry]) -> bool:
    """Add results to the user's file of a device; what other processes added meanwhile is kept.

    Returns:
        Whether they could be written. Where not they hold for this process, and a note says why.
    """
    path = _folder() / f"{device}.json"
    try:
        with _locked(path):
            entries = {**_read(path, device), **found}
            _write(path, device, entries)
        kept = True
    except OSError as error:
        note("tuning", "not kept", f"{path}: {error.strerror or error}")
        print(f"mlx-qlayers: tuning results are not kept, {path}: {error}", file=sys.stderr)
        _unsaved.setdefault(device, {}).update(found)
        kept = False
    forget()
    return kept


def listed(device: str | None = None) -> dict[str, dict[str, Entry]]:
    """The user's results by device."""
    paths = sorted(_folder().glob(f"{device or '*'}.json"))
    return {path.stem: _read(path, path.stem) for path in paths}


def clear(device: str | None = None) -> int:
    """Delete the user's results, of one device or all; how many there were."""
    found = listed(device)
    for name in found:
        (_folder() / f"{name}.json").unlink(missing_ok=True)
    _unsaved.clear()
    forget()
    return sum(map(len, found.values()))


_unsaved: dict[str, dict[str, Entry]] = {}


def _folder() -> Path:
    return cache_folder() / "tuning"


_forgetting: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Have something done whenever the results change."""
    _forgetting.append(forget)


def forget() -> None:
    """Read the results anew when they are next needed."""
    for function in _forgetting:
        function()


@cache
def entries(device: str) -> dict[str, Entry]:
    """The results for a device, by key: those that come with the package, and the user's."""
    shipped = _read(_SHIPPED / f"{device}.json", device)
    return {**shipped, **_read(_folder() / f"{device}.json", device), **_unsaved.get(device, {})}


for _kept in (stored, entries):
    on_change(_kept.cache_clear)


def _checked(entry: Entry, configs: tuple[type[C], ...], kernels: tuple[Kernel, ...]) -> type[C]:
    """The class of an entry's configuration, if it is of this MLX and these kernels."""
    if entry.mlx != version("mlx"):
        raise ValueError(f"measured with MLX {entry.mlx}, this is {version('mlx')}")
    if entry.source != source_hash(*kernels):
        raise ValueError("measured with another version of the kernel")
    wanted = {kind: sorted(_names(kind)) for kind in configs}
    if (found := sorted(entry.config)) not in wanted.values():
        raise ValueError(f"has the fields {found}, not {' or '.join(map(str, wanted.values()))}")
    return next(kind for kind, names in wanted.items() if names == found)


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _read(path: Path, device: str) -> dict[str, Entry]:
    """The entries of a file; what is damaged or of another device is left out, with a note."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        note("tuning", "ignored", f"{path}: {error}")
        return {}
    try:
        content = json.loads(text)
        if content["device"] != device:
            raise ValueError(f"is of device {content['device']}")
        return {key: _entry(value) for key, value in content["entries"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        note("tuning", "ignored", f"{path}: {error}")
        return {}


_KINDS: dict[str, Callable[[Any], bool]] = {
    "config": lambda v: isinstance(v, dict) and all(isinstance(x, (int, str)) for x in v.values()),
    "path": lambda v: isinstance(v, str),
    "seconds": lambda v: isinstance(v, (int, float)),
    "heuristic": lambda v: isinstance(v, (int, float)),
    "tried": lambda v: isinstance(v, int),
    "source": lambda v: isinstance(v, str),
    "mlx": lambda v: isinstance(v, str),
}


def _entry(value: Any) -> Entry:
    entry = Entry(**value)
    for name, fits in _KINDS.items():
        if not fits(getattr(entry, name)):
            raise ValueError(f"{name} is {getattr(entry, name)!r}")
    return entry


def _write(path: Path, device: str, entries: Mapping[str, Entry]) -> None:
    content = {"device": device, "entries": {k: asdict(v) for k, v in sorted(entries.items())}}
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from changing a file between its reading and its writing."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
