"""From the key of a call to a plan made once: checks, path, configuration, gradient."""

from .choice import Choice, choose
from .dispatcher import Operation, Plan, dispatch
from .gradients import Gradient, gradient_of

__all__ = ["Choice", "Gradient", "Operation", "Plan", "choose", "dispatch", "gradient_of"]
