"""The model of the repository, converted, beside stock mlx-lm."""

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from mlx_qlayers import backend, convert_model, explain, revert_model
from mlx_qlayers.commands.demo import shipped_model

PROMPT = "There was once a miller who had a beautiful daughter,"


def greedy(model, prompt, count):
    return [int(token) for token, _ in generate_step(prompt, model, max_tokens=count)]


@pytest.mark.slow
def test_chooses_the_tokens_that_stock_mlx_lm_chooses():
    model, tokenizer = load(str(shipped_model()))
    model.set_dtype(mx.float32)
    prompt = mx.array(tokenizer.encode(PROMPT))
    stock = greedy(model, prompt, 100)
    report = convert_model(model, config=shipped_model())
    assert set(report.counts) == {"swapped"}
    explain(reset=True)
    assert greedy(model, prompt, 100) == stock
    assert {decision.op for decision in explain()} >= {"quantized_matmul", "attention"}, backend()
    revert_model(model)
    assert greedy(model, prompt, 20) == stock[:20]
