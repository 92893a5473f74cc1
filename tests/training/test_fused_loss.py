"""The loss of mlx-lm's trainer without logits, against mlx-lm's own."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architecture_table import ARCHITECTURES
from architectures import build
from mlx.utils import tree_flatten
from mlx_lm.models.qwen2 import Model, ModelArgs
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_qlayers import convert_model, fused_loss, use_backend

BATCH = mx.array(np.random.default_rng(0).integers(0, 128, (2, 9)))
LENGTHS = mx.array([[0, 9], [3, 6]])


@pytest.fixture(autouse=True)
def without_kernels():
    with use_backend("reference"):
        yield


def adapted(model: nn.Module, use_dora: bool = False) -> nn.Module:
    """The model with adapters that have learned something."""
    model.freeze()
    config = {"rank": 2, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(model, len(model.layers), config, use_dora)
    return grown(model)


def grown(model: nn.Module) -> nn.Module:
    weights = tree_flatten(model.trainable_parameters())
    model.load_weights([(k, mx.random.normal(w.shape) / 9) for k, w in weights], strict=False)
    return model


def step(model: nn.Module, loss: object) -> list[mx.array]:
    """The loss, the number of tokens and all gradients."""
    (value, count), gradients = nn.value_and_grad(model, loss)(model, BATCH, LENGTHS)
    return [value, count, *(g for _, g in tree_flatten(gradients))]


def assert_same(found: list[mx.array], stock: list[mx.array]) -> None:
    assert found[1].item() == stock[1].item() and len(found) == len(stock) > 2
    largest = max(mx.abs(g).max().item() for g in stock[2:])
    for mine, theirs in zip(found, stock, strict=True):
        assert mx.abs(mine - theirs).max() <= 2e-5 * max(largest, mx.abs(theirs).max().item())


# The layer that makes the logits of each, and their transformation.
FORMS = {
    "qwen2": "fused loss of lm_head",
    "gemma": "fused loss of model.embed_tokens",
    "gemma2": "fused loss of model.embed_tokens capped at 30.0",
    "gemma3": "fused loss of language_model.lm_head",
    "cohere": "fused loss of model.embed_tokens scaled by 0.0625",
    "granitemoehybrid": "fused loss of lm_head scaled by 0.5",
    "gpt2": "fused loss of model.wte",
    "muse_glimmer": "fused loss of lm_head scaled by 0.196116, capped at 20.0",
    "nanochat": "fused loss of lm_head capped at 15.0",
    "phixtral": "fused loss of lm_head.linear",
    "talkie": "mlx-lm's loss: no layer gives its 128 logits but for a factor and a softcap",
    "deepseek_v3": "fused loss of lm_head",
    "lfm2-vl": "fused loss of language_model.model.embed_tokens",
    "phi": "fused loss of lm_head",  # which has a bias
}


@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradients_of_adapters_are_those_of_stock(name):
    model = adapted(build(name, ARCHITECTURES[name]))
    stock = step(model, default_loss)
    convert_model(model)
    model.train()
    loss = fused_loss(model)
    assert str(loss) == FORMS[name]
    assert_same(step(model, loss), stock)


def test_all_architectures_but_one():
    """The layer is found, and no random number is drawn for it."""
    mx.random.seed(5)
    expected = mx.random.normal((2,))
    left = []
    for name, architecture in ARCHITECTURES.items():
        model = build(name, architecture)
        mx.random.seed(5)
        if fused_loss(model).head is None:
            left.append(name)
        assert mx.array_equal(mx.random.normal((2,)), expected)
    assert left == ["talkie"]


def small(tied: bool = True, words: int = 5000, layers: int = 2) -> Model:
    sizes = {"num_key_value_heads": 2, "tie_word_embeddings": tied}
    return Model(ModelArgs("qwen2", 64, layers, 128, 2, 1e-6, words, **sizes))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_compiled_step_with_checkpoints(tied, bits, monkeypatch):
    """As mlx-lm's trainer has it; more words than there are in a block."""
    mx.random.seed(1)
    model = small(tied)
    if bits:
        nn.quantize(model, bits=bits)
    stock = step(adapted(model), default_loss)
    layer = type(model.layers[0])
    monkeypatch.setattr(layer, "__call__", layer.__call__)  # undoes what follows
    grad_checkpoint(model.layers[0])
    loss = fused_loss(model)
    compiled = mx.compile(lambda: step(model, loss), inputs=[model.state])
    assert_same(compiled(), stock)
    grown(model)
    assert_same(compiled(), step(model, default_loss))


def test_all_parameters():
    """The tied embedding learns from what it embeds and from the loss."""
    mx.random.seed(1)
    model = small()
    assert_same(step(model, fused_loss(model)), step(model, default_loss))


def test_memory_is_less_than_that_of_the_logits():
    model, peaks = adapted(small(words=20_000)), []
    batch, lengths = mx.tile(BATCH, (4, 8)), mx.tile(mx.array([[0, 72]]), (8, 1))
    for loss in (default_loss, fused_loss(model)):
        mx.eval(model.parameters())
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(nn.value_and_grad(model, loss)(model, batch, lengths))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < peaks[0] / 3


def test_another_model_or_head_is_refused():
    model = small(False)
    loss = fused_loss(model)
    with pytest.raises(ValueError, match="model: this loss was made for another one"):
        loss(small(), BATCH, LENGTHS)
    model.lm_head = nn.Linear(64, 5000)
    with pytest.raises(ValueError, match="lm_head makes its logits no more; make a new loss"):
        loss(model, BATCH, LENGTHS)
