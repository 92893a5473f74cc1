"""Keeps what the tuner found: files are replaced in one step, under a lock, and nothing is lost.

Entries of another version or of a user are written back as they were. A file that cannot be read
is not touched, and one that is damaged is set aside.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..runtime.backend import advance_epoch
from ..runtime.cache_folder import make_folder
from ..runtime.explain import note
from ..runtime.staging import remove_leftovers, replace_file, turn
from .entries import Entry, load, raw, read, unsaved, user_folder


def save(device: str, found: Mapping[str, Entry], folder: Path | None = None) -> bool:
    """Add results by key to the file of a device; what other processes added meanwhile is kept.

    If they cannot be written, they hold for this process, a note says why, and it returns False.
    """
    try:
        path = (folder or user_folder()) / f"{device}.json"
        make_folder(path.parent)
        with turn(path.with_suffix(".lock")):
            content = _content(path, device)
            content["entries"] |= {key: raw(entry) for key, entry in found.items()}
            content["entries"] = dict(sorted(content["entries"].items()))
            replace_file(path, _text(content) + "\n")
        kept = True
    except OSError as error:
        note("tuning", "not kept", str(error))
        if device not in unsaved:  # a calibration saves each second
            print(f"mlx-qlayers: measurements are not kept: {error}", file=sys.stderr)
        unsaved.setdefault(device, {}).update(found)
        kept = False
    advance_epoch()
    return kept


@contextlib.contextmanager
def exclusive(device: str, patience: float) -> Iterator[bool]:
    """Be the only process that measures a device, after at most ``patience`` seconds.

    It yields whether this process is the only one, as it is where there is no place for a lock.
    """
    import fcntl

    with contextlib.ExitStack() as stack:
        alone, until = True, time.monotonic() + patience
        try:
            folder = user_folder()
            make_folder(folder)
            lock = stack.enter_context(open(folder / f"{device}.measuring", "w"))
        except OSError:
            lock = None
        waited = False
        while lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                alone, waited = time.monotonic() < until, True
                if not alone:
                    break
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        if waited:
            advance_epoch()  # the other one has written what it found
        yield alone


def listed(device: str | None = None) -> dict[str, dict[str, Entry]]:
    """The user's results by device."""
    return {
        path.stem: {
            key: entry
            for key, entry in read(path.parent, path.stem).items()
            if entry.config is not None
        }
        for path in _files(device)
    }


def clear(device: str | None = None) -> int:
    """Delete the user's results, of one device or all; how many there were."""
    found = listed(device)
    for path in _files(device):
        with turn(path.with_suffix(".lock")):
            path.unlink(missing_ok=True)
            remove_leftovers(path.parent, f".{path.name}.*")
    for name in [device] if device else list(unsaved):
        unsaved.pop(name, None)
    advance_epoch()
    return sum(map(len, found.values()))


def _files(device: str | None) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(user_folder().glob(f"{device or '*'}.json"))
    return []


def _content(path: Path, device: str) -> dict[str, Any]:
    """The content of a file; empty if it is damaged or foreign: then it gets another name."""
    try:
        return load(path, device)
    except ValueError as error:
        number = 1
        while (aside := path.with_suffix(f".damaged-{number}")).exists():
            number += 1
        os.replace(path, aside)
        note("tuning", "set aside", f"{path} {error}; it is now {aside.name}")
        return {"device": device, "entries": {}}


def _text(value: Any, depth: int = 0) -> str:
    """JSON with a line for each name, and for each row of a table."""
    indent, rows = "\n" + " " * depth, isinstance(value, list) and value
    if rows and isinstance(value[0], (list, Mapping)):
        return f"[{indent} " + f",{indent} ".join(map(json.dumps, value)) + f"{indent}]"
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    lines = (f"{json.dumps(key)}: {_text(each, depth + 1)}" for key, each in value.items())
    return "{" + indent + " " + f",{indent} ".join(lines) + indent + "}"
