"""The command convert: what it prints, and where."""

import json
import os
import pty
import subprocess
import termios
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from command_line import COMMAND, complaints
from mlx_lm.convert import QUANT_RECIPES, convert

from mlx_qlayers.cli import main
from mlx_qlayers.conversion.quantize import quantize_checkpoint


def test_progress_on_a_terminal_only(plain_model, tmp_path, capsys):
    arguments = ["convert", "--hf-path", str(plain_model), "--mlx-path"]
    assert main([*arguments, str(tmp_path / "a")]) == 0
    out, err = capsys.readouterr()
    assert not complaints(err.encode())
    assert out.startswith(f"{tmp_path / 'a'}: 15 quantized layers")
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 100))
    with subprocess.Popen(
        [*COMMAND, *arguments, str(tmp_path / "b")], stdout=subprocess.DEVNULL, stderr=secondary
    ) as process:
        os.close(secondary)
        shown = b""
        try:
            while chunk := os.read(primary, 1024):
                shown += chunk
        except OSError:  # how Linux reports that the other end was closed
            pass
        assert process.wait(60) == 0
    os.close(primary)
    assert b"converting: 100%" in shown


@pytest.mark.parametrize("recipe", QUANT_RECIPES)
def test_recipes_are_those_of_mlx_lm(recipe, plain_model, tmp_path):
    arguments = ["--hf-path", str(plain_model), "--mlx-path", str(tmp_path / "ours")]
    sizes = ["--q-group-size", "32", "--quant-predicate", recipe]
    assert main(["convert", *arguments, *sizes]) == 0
    convert(
        str(plain_model), str(tmp_path / "theirs"), True, q_group_size=32, quant_predicate=recipe
    )
    bits = []
    for name in ("ours", "theirs"):
        model, _ = mlx_lm.load(str(tmp_path / name))
        bits.append({path: m.bits for path, m in model.named_modules() if hasattr(m, "bits")})
    assert bits[0] == bits[1] and len(set(bits[0].values())) == 2


def test_without_its_quantization_as_mlx_lm_writes_it(plain_model, tmp_path, capsys):
    packed, ours, theirs = (str(tmp_path / name) for name in ("packed", "ours", "theirs"))
    quantize_checkpoint(plain_model, packed, mode="nvfp4")
    assert main(["convert", "-d", "--hf-path", packed, "--mlx-path", ours]) == 0
    assert "0 quantized layers, 16.00 bits per weight" in capsys.readouterr().out
    convert(packed, theirs, dequantize=True)
    arrays = [mx.load(f"{folder}/model.safetensors") for folder in (ours, theirs)]
    assert arrays[0].keys() == arrays[1].keys()
    assert all(mx.array_equal(a, arrays[1][name]) for name, a in arrays[0].items())
    config = json.loads((Path(ours) / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & config.keys()
    for source, option, message in (
        (ours, [], "not quantized"),
        (packed, ["--bits", "4"], "no option of a quantization"),
    ):
        arguments = ["--hf-path", source, "--mlx-path", str(tmp_path / "no"), *option]
        assert main(["convert", "--dequantize", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_recipe_leaves_no_choice_of_bits(plain_model, tmp_path, capsys):
    arguments = ["--hf-path", str(plain_model), "--mlx-path", str(tmp_path / "out")]
    assert main(["convert", *arguments, "--bits", "4", "--quant-predicate", "mixed_3_6"]) == 2
    assert "recipe 'mixed_3_6' says bits" in capsys.readouterr().err


def test_the_result_is_uploaded(plain_model, tmp_path, monkeypatch):
    uploads = []
    monkeypatch.setattr("mlx_lm.utils.upload_to_hub", lambda *what: uploads.append(what))
    arguments = ["--hf-path", str(plain_model), "--mlx-path", str(tmp_path / "out")]
    assert main(["convert", *arguments, "--upload-repo", "me/mine"]) == 0
    assert uploads == [(str(tmp_path / "out"), "me/mine")]
