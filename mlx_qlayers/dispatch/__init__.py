"""From the key of a call to a plan made once: checks, path, configuration, gradient."""

from .choice import Choice, choose
from .dispatcher import Operation, Plan, dispatch, either, planned
from .gradients import Arrays, Gradient, gradient_of

__all__ = [
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
