"""The exponential: the smallest kernel family, and the example of one."""

from .launch import exp

__all__ = ["exp"]
