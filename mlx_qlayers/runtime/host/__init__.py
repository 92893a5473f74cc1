"""The host backend: Metal kernels compiled by clang and executed on the CPU."""
