"""The operations: differentiable functions that check their arguments and choose a path."""
