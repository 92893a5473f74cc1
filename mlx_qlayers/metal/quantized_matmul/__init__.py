"""Products with quantized matrices: qmv (up to 16 rows), qmm (more), qvm (x @ w), gradients."""
