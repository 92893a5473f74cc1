"""Which macOS this is."""

from __future__ import annotations

import ctypes
import os


def macos_version() -> tuple[int, int]:
    """macOS's version by its kernel: ``platform.mac_ver`` may say 16 for 26 (cpython 135675)."""
    major, minor = (int(number) for number in os.uname().release.split(".")[:2])
    return (major + 1 if major >= 25 else major - 9), minor


def macos_build() -> str:
    """The build of macOS, as 25C56; on other systems the kernel's version."""
    try:
        ask = ctypes.CDLL(None).sysctlbyname
    except (AttributeError, OSError):
        return os.uname().version
    size, text = ctypes.c_size_t(64), ctypes.create_string_buffer(64)
    wrong = ask(b"kern.osversion", text, ctypes.byref(size), None, ctypes.c_size_t(0))
    return os.uname().version if wrong else text.value.decode()
