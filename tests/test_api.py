"""The public names, and what importing them costs."""

import subprocess
import sys

import pytest

import mlx_qlayers

NAMES = [
    "QLinear", "GridSample", "DeformConv2d", "DeformableAttention", "FusedAttention",
    "convert_model", "revert_model", "load", "register_counterpart", "ConversionReport",
    "quantize_model", "quantized_matmul", "grid_sample", "affine_grid", "deform_conv2d",
    "deformable_attention", "attention", "use_backend", "set_backend", "backend", "explain",
    "linear_cross_entropy", "log_probabilities", "fused_loss", "speculate", "speculate_batch",
    "load_heads",
    "recompute_activations",
]  # fmt: skip


def test_these_names_and_no_others():
    assert sorted(mlx_qlayers.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name):
    text = getattr(mlx_qlayers, name).__doc__
    assert text and text[0].strip() and ">>> " in text


_IMPORT = """
import signal, sys
signal.signal(2, signal.default_int_handler)  # what a shell starts in the background has another
def there(*names):
    return [name for name in names if name in sys.modules]
import mlx_qlayers
assert signal.getsignal(2) is signal.default_int_handler
assert not there("mlx_lm", "transformers", "huggingface_hub", "ziglang", "numpy")
from mlx_qlayers.cli import main
main(["--help"])
assert not there("mlx_lm", "transformers", "tqdm")
import mlx.nn as nn
mlx_qlayers.convert_model(nn.QuantizedLinear(64, 64))
assert not there("mlx_lm.models.switch_layers")
"""


def test_importing_is_light_and_changes_nothing():
    """And so are help, and a conversion of a model that is not mlx-lm's."""
    subprocess.run([sys.executable, "-c", _IMPORT], check=True, stdout=subprocess.DEVNULL)
