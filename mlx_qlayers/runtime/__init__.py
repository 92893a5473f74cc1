"""How a kernel runs: one declaration, one file per backend."""

from .backend import BackendError, Decision, backend, choose, explain, note, use_backend
from .kernel import Kernel, KernelError, Multiple
from .launch import Launch
from .trace import Record, trace

__all__ = [
    "BackendError",
    "Decision",
    "Kernel",
    "KernelError",
    "Launch",
    "Multiple",
    "Record",
    "backend",
    "choose",
    "explain",
    "note",
    "trace",
    "use_backend",
]
