"""Factorisations of float32 matrices and solves with triangular ones."""
