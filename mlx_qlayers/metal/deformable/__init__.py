"""Kernels of multi-scale deformable attention."""
