"""The command demo: report, text and speeds of the model that ships."""

import re

import mlx_lm
import pytest
from command_line import complaints

from mlx_qlayers.cli import main
from tests.forks import Command


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
def test_each_kernel_is_named_once_and_compiled_by_one_process(exact_model, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path / "cache"))

    def run():
        log = tmp_path / "log"
        assert Command(["demo", f"--model={exact_model}", "--max-tokens=4"], log).wait(120) == 0
        return re.findall(r"compiling kernel (\w+) for", log.read_text()), log.read_text()

    named, out = run()
    assert len(named) == len({*named}) > 1
    assert float(re.search(r"^kernels were compiled for ([\d.]+) s", out, re.M)[1]) > 0
    named, out = run()
    assert not named and "compiled for" not in out
