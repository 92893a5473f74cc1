"""The entries that are read from config.json."""

import json

import pytest

from mlx_qlayers.conversion.config import QuantizationConfig
from mlx_qlayers.formats import Format

BASE = {"group_size": 64, "bits": 4}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization": BASE},
        {"quantization_config": BASE},
        {"quantization": BASE, "quantization_config": {"group_size": 32, "bits": 8}},
        {"text_config": {"quantization": BASE}},
        {"text_config": {"quantization_config": BASE}},
    ],
)
def test_global_values(config):
    parsed = QuantizationConfig.parse(config)
    assert parsed.default == Format(64, 4, "affine") and not parsed.layers


def test_no_quantization():
    assert QuantizationConfig.parse({"model_type": "llama"}).default is None


@pytest.mark.parametrize("base", [{"group_size": 32, "bits": 5}, MXFP4])
def test_entries_of_layers_say_what_to_quantized_makes_of_them(base):
    layers = {
        "lm_head": {"bits": 8},
        "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8},  # as mlx-lm's predicates say
        "model.layers.0.mlp.up_proj": {"group_size": 32},
        "model.layers.0.mlp.experts": {"mode": "mxfp4", "group_size": 32, "bits": 4},
        "model.layers.1.mlp.experts": {"mode": "nvfp4"},
        "model.embed_tokens": False,
        "model.layers.2.mlp.up_proj": True,
    }
    config = QuantizationConfig.parse({"quantization": base | layers})
    said = {key: config.entry(key)[1] for key in layers}
    assert list(said.values()) == [
        Format(64, 8),
        Format(64, 8),
        Format(32, 4),
        Format(32, 4, "mxfp4"),
        Format(16, 4, "nvfp4"),
        False,
        Format(**base),
    ]


def test_keys_match_where_a_prefix_was_added_or_dropped():
    config = QuantizationConfig.parse({"quantization": BASE | {"model.layers.0.q": {"bits": 8}}})
    assert config.entry("language_model.model.layers.0.q") == ("model.layers.0.q", Format(64, 8))
    assert config.entry("layers.0.q") == ("model.layers.0.q", Format(64, 8))
    assert config.entry("model.layers.10.q") == ("", Format(64, 4))


def test_other_tools_formats_are_left_to_the_arrays():
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    for entry in (awq, {"quant_method": "fp8"}, {"quant_method": ["mxfp4"]}):
        assert QuantizationConfig.parse({"quantization_config": entry}).default is None
    mxfp4 = QuantizationConfig.parse({"quantization_config": {"quant_method": "mxfp4"}})
    assert mxfp4.default == Format(32, 4, "mxfp4")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (BASE | {"bits": 4.0}, r"quantization\.bits must be .* not 4.0"),
        (BASE | {"mode": "nvfp4"}, r"quantization\.group_size must be 16 in mode 'nvfp4'"),
        (BASE | {"lm_head": {"bits": 7}}, r"quantization\.lm_head\.bits must be"),
        (BASE | {5: False}, r"quantization: the key 5 must be a string"),
    ],
)
def test_bad_entries(entry, message):
    with pytest.raises(ValueError, match=message):
        QuantizationConfig.parse({"quantization": entry})


def test_read_from_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"quantization": BASE}))
    for where in (path, tmp_path, str(tmp_path)):
        assert QuantizationConfig.read(where).default == Format(64, 4)
    for value in (3, ["config.json"]):
        with pytest.raises(ValueError, match="config must be"):
            QuantizationConfig.read(value)
