"""Measurements: what ships with the package, and what was measured on this machine."""
