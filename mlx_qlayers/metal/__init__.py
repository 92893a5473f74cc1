"""The kernels, and beside each source the Python that declares and launches it."""
