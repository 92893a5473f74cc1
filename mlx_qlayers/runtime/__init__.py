"""How a kernel runs: one declaration, one file per backend."""

from .backend import BackendError, set_backend, use_backend
from .explain import explain
from .health import HealthError, checked, health_checks
from .kernel import Kernel, KernelError, Multiple
from .launch import Launch
from .tracing import trace
from .wait import KernelTimeout, wait_for

__all__ = [
    "BackendError",
    "HealthError",
    "Kernel",
    "KernelError",
    "KernelTimeout",
    "Launch",
    "Multiple",
    "checked",
    "explain",
    "health_checks",
    "set_backend",
    "trace",
    "use_backend",
    "wait_for",
]
