"""The command demo: report, text and speeds of the model that ships."""

import os
import re
import subprocess

import mlx_lm
import pytest
from command_line import COMMAND, complaints

from mlx_qlayers.cli import main


def test_demo_prints_report_text_and_speeds(exact_model, capsys):
    arguments = ["--model", str(exact_model), "--max-tokens", "30", "--temp", "0"]
    assert main(["demo", *arguments]) == 0
    out, err = capsys.readouterr()
    model, tokenizer = mlx_lm.load(str(exact_model))
    prompt = "Once upon a time there was a king"
    text = prompt + mlx_lm.generate(model, tokenizer, prompt, max_tokens=30)
    report, found, speeds = out.partition(text)
    assert found and "19 swapped" in report
    assert not complaints(err.encode())
    for row in ("stock", "converted, reference path", "converted, Metal kernels on the"):
        assert re.search(rf"^{row}.* +[\d.]+ +[\d.]+$", speeds, re.MULTILINE), row


@pytest.mark.slow
def test_each_kernel_is_named_once_and_another_process_compiles_none(exact_model, tmp_path):
    command = [*COMMAND, "demo", "--model", str(exact_model), "--max-tokens", "4"]
    environment = os.environ | {"MLX_QLAYERS_CACHE_DIR": str(tmp_path)}

    def run():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return re.findall(r"compiling kernel (\w+) for", done.stderr), done.stdout

    named, out = run()
    assert len(named) == len({*named}) > 1
    assert float(re.search(r"^kernels were compiled for ([\d.]+) s", out, re.M)[1]) > 0
    named, out = run()
    assert not named and "compiled for" not in out
