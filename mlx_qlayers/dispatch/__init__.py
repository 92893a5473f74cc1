"""From the key of a call to a plan made once: checks, path, configuration, gradient."""

from .choice import KERNELS, Choice, choose
from .dispatcher import Operation, Plan, dispatch, either, planned
from .gradients import Arrays, Gradient, gradient_of

__all__ = [
    "KERNELS",
    "Arrays",
    "Choice",
    "Gradient",
    "Operation",
    "Plan",
    "choose",
    "dispatch",
    "either",
    "gradient_of",
    "planned",
]
