"""The operations in MLX's own operators: the oracle, and the path where no kernel runs."""
