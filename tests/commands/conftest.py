"""Fixtures that the tests of commands share."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def exact_model(tmp_path_factory):
    """A quantized checkpoint in float32, in which greedy choices do not depend on rounding."""
    path = tmp_path_factory.mktemp("exact") / "model"
    return save_tiny_model(path, dtype=mx.float32, torch_dtype="float32", seed=3)


@pytest.fixture(scope="module")
def adapters(exact_model, tmp_path_factory):
    """Adapters of that model which change what it says."""
    path = tmp_path_factory.mktemp("adapters")
    model, _ = mlx_lm.load(str(exact_model))
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    model.freeze()
    linear_to_lora_layers(model, 2, parameters)
    mx.random.seed(7)
    weights = {
        name: 0.1 * mx.random.normal(weight.shape)
        for name, weight in tree_flatten(model.trainable_parameters())
    }
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
