"""The command demo: report, text and speeds of the model that ships."""

import re

import mlx_lm
from command_line import complaints

from mlx_qlayers.cli import main


def test_demo_prints_report_text_and_speeds(exact_model, capsys):
    arguments = ["--model", str(exact_model), "--max-tokens", "30", "--temp", "0"]
    assert main(["demo", *arguments]) == 0
    out, err = capsys.readouterr()
    model, tokenizer = mlx_lm.load(str(exact_model))
    prompt = "Once upon a time there was a king"
    text = prompt + mlx_lm.generate(model, tokenizer, prompt, max_tokens=30)
    report, found, speeds = out.partition(text)
    assert found and "17 swapped" in report
    assert not complaints(err.encode())
    for row in ("stock", "converted, reference path", "converted, Metal kernels on the"):
        assert re.search(rf"^{row}.* +[\d.]+ +[\d.]+$", speeds, re.MULTILINE), row
