"""Products with quantized matrices: qmv (few rows), qmm (many), qvm (untransposed), gradients."""
