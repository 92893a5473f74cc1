"""The check of a model directory, against the safetensors library and MLX itself."""

import json
import os
import random
import shutil
import time

import mlx.core as mx
import pytest
from safetensors import SafetensorError, deserialize

from mlx_qlayers.conversion.checkpoint import check_adapter, check_directory, read_header


@pytest.mark.parametrize("seed", range(4))
def test_headers_are_judged_as_the_format_says(seed, tmp_path):
    """Files that the safetensors library accepts are accepted, and MLX can read all that are."""
    draw = random.Random(seed)
    file = tmp_path / "model.safetensors"
    arrays = {"a": mx.ones((3, 5)), "b": mx.ones((7,), mx.bfloat16), "c": mx.ones((), mx.uint8)}
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})
    sound = file.read_bytes()
    accepted = 0
    for _ in range(250):
        raw = bytearray(sound)
        for _ in range(draw.randint(1, 2)):
            at = draw.randrange(len(raw) if draw.random() < 0.5 else 200)
            digit = chr(raw[at]).isdigit()
            raw[at] = ord(draw.choice("0123456789")) if digit else draw.randrange(256)
        if draw.random() < 0.1:
            del raw[draw.randrange(len(raw)) :]
        file.write_bytes(raw)
        try:
            deserialize(bytes(raw))
            strict = True
        except SafetensorError:
            strict = False
        try:
            read_header(file)
        except ValueError as error:
            assert not strict and str(file) in str(error)
            continue
        accepted += 1
        try:
            mx.eval(mx.load(str(file)))
        except RuntimeError:
            assert not strict
    assert 10 < accepted < 240


def test_a_repeated_name_is_found_in_linear_time(tmp_path):
    file = tmp_path / "model.safetensors"
    names = [f'"{i:06}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(50_000)]
    text = f"{{{','.join([*names, names[-1]])}}}".encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    start = time.process_time()
    with pytest.raises(ValueError, match="'049999' appears twice"):
        read_header(file)
    assert time.process_time() - start < 3  # 36 seconds, where each name was counted


def test_an_adapter_and_its_configuration_agree(tmp_path):
    def adapter(weights: dict[str, mx.array], **parameters: object) -> None:
        mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
        config = {"num_layers": 1, "lora_parameters": {"rank": 4, "scale": 2.0} | parameters}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    weights = {"q.lora_a": mx.ones((8, 4)), "q.lora_b": mx.ones((4, 8))}
    experts = {"e.lora_a": mx.ones((2, 4, 8)), "e.lora_b": mx.ones((2, 8, 4))}
    adapter(weights | experts)
    check_adapter(tmp_path)
    for arrays, parameters, says in (
        (weights, {"rank": 10**9}, "'rank' is 1000000000, .* is 4"),
        ({}, {"rank": 10**9}, "'rank' is 1000000000, .* is none"),
        (weights, {"rank": [4]}, r"'rank' is \[4\]"),
        (weights | {"k.lora_a": mx.ones((8, 5))}, {}, "'rank' is 4, .* is 4, 5"),
        ({"q.lora_a": mx.ones(4)}, {}, "'rank' is 4, .* is none"),
        (weights, {"scale": "2"}, "'scale' must be .*, not '2'"),
        (weights, {"scale": float("nan")}, "'scale' must be .*, not nan"),
        (weights, {"scale": 1e39}, r"'scale' must be .*, not 1e\+39"),
    ):
        adapter(arrays, **parameters)
        with pytest.raises(ValueError, match=f"adapter_config.json: {says}"):
            check_adapter(tmp_path)
    for name in ("adapters.safetensors", "adapter_config.json"):
        adapter(weights)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            check_adapter(tmp_path)
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}: must be a file, and is a pipe"):
            check_adapter(tmp_path)
        (tmp_path / name).unlink()


def test_an_empty_tensor_may_be_anywhere(tmp_path):
    file = tmp_path / "model.safetensors"
    for begin in (0, 4, 8):
        entries = {"a": ([2], 0, 8), "b": ([0], begin, begin), "c": ([1], 8, 12)}
        text = json.dumps(
            {
                name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
                for name, (shape, *offsets) in entries.items()
            }
        ).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
        assert set(read_header(file)) == {*"abc"}
        assert {name: a.shape for name, a in mx.load(str(file)).items()}["b"] == (0,)


def test_every_dtype_of_mlx_is_known(tmp_path):
    names = ("bool_", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
    names += ("float16", "bfloat16", "float32", "complex64")
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), {n: mx.zeros((2, 3), getattr(mx, n)) for n in names})
    assert set(read_header(file)) == {*names}


def test_an_index_left_over_beside_merged_weights_does_no_harm(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00001-of-00002.safetensors")
    file.write_text(json.dumps(index))
    check_directory(path)
