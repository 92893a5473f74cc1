"""From the key of a call to a plan made once: checks, path, configuration, gradient."""

# ruff: noqa: F401 - others find these here
from .choice import KERNELS, Choice, choose
from .dispatcher import Operation, Plan, dispatch, either, planned
from .gradients import Arrays, Gradient, gradient_of
