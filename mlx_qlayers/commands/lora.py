"""Fine-tune a model with the converted layers, as mlx_lm.lora does."""

from functools import partial

from .borrowed import add_arguments, run_converted

__all__ = ["add_arguments", "run"]

run = partial(run_converted, "lora")
