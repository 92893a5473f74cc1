"""Calls that are interrupted at one of the lines that they run."""

import sys
from collections.abc import Callable, Container
from types import FrameType
from typing import Any


def interrupted(run: Callable[[], object], at: int, files: Container[str]) -> bool:
    """Whether Ctrl-C met a call at so many lines that it runs in some files, or came too late."""
    left = at

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_filename in files:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
