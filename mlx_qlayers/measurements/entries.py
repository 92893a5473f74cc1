"""Measurements as they are stored: one JSON file for each device, read entry by entry.

``{"device": "sm_90", "limits": {...}, "entries": {KEY: ENTRY}}``. Limits are attributes of its
:class:`~mlx_qlayers.runtime.devices.record.Device`. An entry has the configuration that tuning
found for a key, or values that rules go by; with its date, command and version of MLX. Those
that come with the package are in ``data/``; the user's own, in the cache folder, come first. An
entry that cannot be understood is left alone, with a note, and costs the others nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..runtime.backend import epoch as current
from ..runtime.cache_folder import cache_folder
from ..runtime.devices import device_of
from ..runtime.devices.record import FILES
from ..runtime.explain import note, significant

SHIPPED = FILES
# Fields of an entry that says which path was fastest.
_OF_COMPARED = ("seconds", "heuristic", "tried", "source", "mlx")
# The path of an entry whose seconds are an estimate: no operation goes by it.
COMPUTED = "modelled"


@dataclass(frozen=True)
class Entry:
    """A measurement on one device: of a problem, or values that rules go by."""

    config: Mapping[str, int | str] | None = None  # fields of the kernel's fastest configuration
    # The fastest path: `"kernel"`, `"stock"`, `"dequantized"`, `"tensor"` or `"codes"`; or
    # `"uncompared"` where the kernel alone was timed.
    path: str = ""
    seconds: float = 0.0  # what that path takes
    heuristic: float = 0.0  # what the kernel takes with the configuration it has without tuning
    tried: int = 0  # how many configurations were tried
    source: str = ""  # the kernel's text, hashed; of what was not compared it may be left out
    mlx: str = ""  # the version of MLX
    paths: Mapping[str, float] = field(default_factory=dict)  # seconds of each path
    date: str = ""  # when it was measured
    command: str = ""  # by which command
    # In place of a configuration, a number, text or a list of those, or a mapping to them.
    values: Any = None
    note: str = ""  # what values are, and on what they were measured


@dataclass(frozen=True)
class Evidence:
    """Where an answer comes from."""

    source: str  # `"measured here"`, or `"shipped result"` of another machine
    device: str  # that it was measured on
    date: str = ""  # when
    command: str = ""  # by which command
    seconds: Mapping[str, float] | None = None  # of each path, where paths were compared

    def __str__(self) -> str:
        where = "" if self.source == "measured here" else f" of {self.device}"
        when = f", {self.date}" if where and self.date else ""
        seconds = (self.seconds or {}).items()
        times = ", ".join(f"{name} {significant(1e6 * s)} us" for name, s in seconds)
        return f"{self.source}{where}{when}" + (f": {times}" if times else "")


@cache
def device_kind() -> str | None:
    """The backend of this machine's GPU: ``"metal"``, ``"cuda"``, or None without one."""
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


@cache
def device_name() -> str:
    """The name of an Apple GPU, of an NVIDIA GPU its architecture; without one ``"cpu"``."""
    if (kind := device_kind()) is None:
        return "cpu"
    facts = mx.device_info(mx.gpu)
    name = next(filter(None, map(facts.get, device_of(kind).named_by)), "gpu")
    return str(name).replace(" ", "_")


def file_of(device: str) -> str | None:
    """The name of the file for a backend on this machine; None where it has no device here."""
    if not (of := device_of(device)).gpu:
        return of.name or None
    return device_name() if device == device_kind() else None


def devices(kind: str) -> tuple[str, ...]:
    """The names of a backend's device here, and of those whose values hold where it has none."""
    others = device_of(kind).others or (kind,)
    return file_of(kind) or others[0], *others


def user_folder() -> Path:
    """The folder of the user's own results; an OSError without a home folder."""
    return cache_folder() / "tuning"


# Results of this process that could not be written, by device.
unsaved: dict[str, dict[str, Entry]] = {}
# Those of rank 0 in the place of the user's own, by device, in the other ranks of a group.
adopted: dict[str, dict[str, Entry]] = {}


def look_up(key: str, *devices: str) -> tuple[Entry, Evidence] | None:
    """The entry under a key of the first device that has one, and where it comes from.

    Measurements of this machine count for the first of the devices.
    """
    for i, device in enumerate(devices):
        entry, shipped = entries(device, current.number).get(key, (None, False))
        if entry is not None and (shipped or i == 0):
            source = "shipped result" if shipped else "measured here"
            seconds = entry.paths or {entry.path: entry.seconds} if entry.seconds else None
            return entry, Evidence(source, device, entry.date, entry.command, seconds)
    return None


@lru_cache(maxsize=64)
def entries(device: str, at: int) -> Mapping[str, tuple[Entry, bool]]:
    """All that is stored for a device as of an epoch, by key, and whether the package holds it."""
    found = {key: (entry, True) for key, entry in read(SHIPPED, device).items()}
    for key, entry in own_entries(device).items():
        before = found.get(key)
        # Rules count on values of the kind that they were written for.
        of_rules = entry.values is not None
        if of_rules and not (before and _kinds(entry.values) == _kinds(before[0].values)):
            note("tuning", "ignored", f"{device}: {key} has other values than the package's")
        else:
            found[key] = entry, False
    return found


def own_entries(device: str) -> Mapping[str, Entry]:
    """The user's results for a device, or rank 0's."""
    if device in adopted:
        return adopted[device]
    try:
        own = read(user_folder(), device)
    except OSError as error:
        note("tuning", "ignored", str(error))
        own = {}
    return {**own, **unsaved.get(device, {})}


def read(folder: Path, device: str) -> dict[str, Entry]:
    """The entries of a file that can be understood; of all others a note is kept."""
    path, found = folder / f"{device}.json", {}
    try:
        stored = load(path, device)["entries"]
    except (OSError, ValueError) as error:
        note("tuning", "ignored", f"{path}: {error}")
        return {}
    for key, value in stored.items():
        try:
            found[key] = parsed(value)
        except ValueError as error:
            note("tuning", "ignored", f"{path}: {key}: {error}")
    return found


def load(path: Path, device: str) -> dict[str, Any]:
    """A file as it is, with fields of other versions; empty if there is none.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not hold results of this device.
    """
    if path.exists() and not path.is_file():
        raise OSError("is not a file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"device": device, "entries": {}}
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), dict):
        raise ValueError("has no entries")
    if content.get("device") != device:
        raise ValueError(f"is of device {content.get('device')!r}")
    return content


def parsed(value: Any) -> Entry:
    """An entry of a file without unknown fields; a ValueError for missing or wrong ones."""
    if not isinstance(value, dict):
        raise ValueError(f"is {value!r}")
    given = {f.name: value[f.name] for f in fields(Entry) if value.get(f.name) is not None}
    compared = given.get("path") != "uncompared"
    needed = () if "values" in given else ("config", "path", *_OF_COMPARED * compared)
    for name in needed:
        if name not in given:
            raise ValueError(f"has no {name}")
    for name, each in given.items():
        if not _FITS[name](each):
            raise ValueError(f"{name} is {each!r}")
    return Entry(**given)


def raw(entry: Entry) -> dict[str, Any]:
    """An entry as it is stored; :func:`parsed` reads it."""
    empty = asdict(Entry())
    for name in _OF_COMPARED if entry.config is not None and entry.path != "uncompared" else ():
        del empty[name]
    return {name: each for name, each in asdict(entry).items() if each != empty.get(name, ...)}


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value > 0


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_value(each) or _is_mapping(_is_value)(each) for each in value)
    return isinstance(value, (int, str)) or (isinstance(value, float) and isfinite(value))


def _is_mapping(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("path", "source", "mlx", "date", "command", "note"), lambda value: isinstance(value, str)
    ),
    **dict.fromkeys(("seconds", "heuristic"), _is_seconds),
    "config": _is_mapping(lambda value: isinstance(value, (int, str))),
    "paths": _is_mapping(_is_seconds),
    "tried": lambda value: type(value) is int,
    "values": lambda value: _is_value(value) or _is_mapping(_is_value)(value),
}


def _kinds(value: Any) -> Any:
    """Of values, of what types they are, key by key."""
    if isinstance(value, dict):
        return {key: _kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_kinds(each) for each in value]
    return float if type(value) is int else type(value)
