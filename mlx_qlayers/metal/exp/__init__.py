"""The exponential: the smallest kernel family, and the example of one."""
