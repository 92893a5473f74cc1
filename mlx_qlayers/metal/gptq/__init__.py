"""Quantization of columns one after the other, with their errors passed on (GPTQ)."""
