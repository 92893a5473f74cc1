"""Factorisations of batches of float32 matrices on GPUs, where ``mx.linalg`` has CPUs only."""

from .ops.linalg import cho_solve, cholesky, cholesky_inv, qr, solve_triangular

__all__ = ["cho_solve", "cholesky", "cholesky_inv", "qr", "solve_triangular"]
