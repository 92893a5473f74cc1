"""How a kernel runs: one declaration, one file per backend."""
