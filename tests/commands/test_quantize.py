"""The commands quantize and perplexity, one after the other."""

import re

import pytest
from tiny_model import TEXT

from mlx_qlayers.cli import main


def test_quantize_and_perplexity(plain_model, tmp_path, capsys):
    text, target = tmp_path / "text.txt", tmp_path / "model"
    text.write_text(TEXT * 4)
    common = ["--text", str(text), "--samples", "4", "--sequence-length", "32"]
    made = ["quantize", "--model", str(plain_model), "--mlx-path", str(target), "--bits", "4"]
    assert main([*made, *common]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: 15 quantized layers")
    asked = ["perplexity", "--model", str(target), "--reference", str(plain_model)]
    assert main([*asked, *common]) == 0
    tokens, header, *rows = capsys.readouterr().out.splitlines()
    assert tokens == "124 tokens"
    names = ["model", "perplexity", "+-", "rise of loss", "+-", "KL, nats"]
    assert re.split(r"\s{2,}", header.strip()) == names
    found = {row.split()[0]: [float(x) for x in row.split()[1:]] for row in rows}
    assert [*found] == ["stock", "converted", "reference"]
    assert found["reference"][2:] == [0, 0, 0] and min(found["stock"][3:]) > 0
    assert found["stock"][0] == pytest.approx(found["converted"][0], rel=0.01)
    assert main([*made, *common]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
