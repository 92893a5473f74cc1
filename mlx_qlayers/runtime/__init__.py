"""How a kernel runs: one declaration, one file per backend."""

from .backend import BackendError, use_backend
from .kernel import Kernel, KernelError, Multiple
from .launch import Launch
from .tracing import trace

__all__ = [
    "BackendError",
    "Kernel",
    "KernelError",
    "Launch",
    "Multiple",
    "trace",
    "use_backend",
]
