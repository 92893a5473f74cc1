"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mlx_qlayers

NAMES = [
    "QLinear",
    "GridSample",
    "DeformConv2d",
    "DeformableAttention",
    "FusedAttention",
    "convert_model",
    "revert_model",
    "load",
    "register_counterpart",
    "ConversionReport",
    "quantize_model",
    "quantized_matmul",
    "grid_sample",
    "affine_grid",
    "deform_conv2d",
    "deformable_attention",
    "attention",
    "use_backend",
    "set_backend",
    "backend",
    "explain",
]


def test_these_names_and_no_others():
    assert sorted(mlx_qlayers.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name):
    text = getattr(mlx_qlayers, name).__doc__
    assert text and text[0].strip() and ">>> " in text


def test_importing_is_light():
    code = "import sys, mlx_qlayers; print([m for m in {} if m in sys.modules])"
    heavy = ["mlx_lm", "transformers", "huggingface_hub", "ziglang", "numpy"]
    found = subprocess.run(
        [sys.executable, "-c", code.format(heavy)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
