"""mlx-lm's own tools on a converted model do what they do on the stock one."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
import tiny_model
from architectures import VOCABULARY, Architecture, build
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.qwen2 import TransformerBlock
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers
from mlx_lm.utils import dequantize_model, load_model, quantize_model, save
from numerics import TRAINED, assert_same_model, assert_same_sums

from mlx_qlayers import QLinear, convert_model
from mlx_qlayers.layers.qlinear import QEmbedding

QWEN = Architecture(2, {"tie_word_embeddings": True}, format=(64, 4, "affine"))
CONFIG: dict[str, Any] = tiny_model.CONFIG | {
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "quantization": {"group_size": 64, "bits": 4},
}
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
TOKENIZER = SimpleNamespace(
    eos_token_ids=[], decode=lambda ids: " ".join(map(str, ids)), save_pretrained=lambda path: None
)
ADAPTER: dict[str, Any] = {"rank": 4, "scale": 2.0, "dropout": 0.0}
LORA_KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


@pytest.fixture
def stock():
    return build("qwen2", QWEN)


@pytest.fixture
def model():
    converted = build("qwen2", QWEN)
    convert_model(converted)
    return converted


def assert_same(found: nn.Module, stock: nn.Module, what: str) -> None:
    assert_same_model(found(TOKENS), stock(TOKENS), bits=None, what=what)


def arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def assert_equal(found: dict[str, mx.array], stock: dict[str, mx.array]) -> None:
    assert found.keys() == stock.keys()
    assert all(mx.array_equal(found[key], stock[key]) for key in stock)


class TestFiles:
    def test_save(self, model, stock, tmp_path):
        save(tmp_path, tmp_path, model, TOKENIZER, dict(CONFIG), donate_model=False)
        reloaded, config = load_model(tmp_path)
        assert config["quantization"] == CONFIG["quantization"]
        assert type(reloaded.model.layers[0].mlp.up_proj) is nn.QuantizedLinear
        assert_equal(arrays(reloaded), arrays(stock))
        assert mx.array_equal(reloaded(TOKENS), stock(TOKENS))
        convert_model(reloaded, config=tmp_path)
        assert mx.array_equal(reloaded(TOKENS), model(TOKENS))

    def test_weights(self, model, stock, tmp_path):
        path = str(tmp_path / "weights.safetensors")
        changed = tree_map(lambda p: p * 0.5 if p.dtype == mx.float32 else p, stock.parameters())
        stock.update(changed)
        stock.save_weights(path)
        model.load_weights(path)
        assert_same(model, stock, "loaded into the converted model")
        model.save_weights(path)
        assert_equal(mx.load(path), arrays(stock))


def adapted(model: nn.Module, **kw: Any) -> nn.Module:
    model.freeze()
    mx.random.seed(11)
    linear_to_lora_layers(model, 2, ADAPTER | {"keys": LORA_KEYS}, **kw)
    return model


def step(model: nn.Module) -> mx.array:
    """One step of training; the loss before it."""
    lengths = mx.array([[0, 9], [2, 9]])
    (loss, _), gradients = nn.value_and_grad(model, default_loss)(model, TOKENS, lengths)
    optimizer = optim.SGD(learning_rate=1.0)
    optimizer.update(model, gradients)
    mx.eval(model.parameters())
    return loss


def fused(model: nn.Module, dequantize: bool) -> nn.Module:
    layers = [(n, m.fuse(dequantize)) for n, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(layers))
    return model


class TestAdapters:
    @pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
    @pytest.mark.parametrize("dequantize", [False, True], ids=["quantized", "dequantized"])
    def test_train_and_fuse(self, model, stock, use_dora, dequantize):
        for m in (model, stock):
            adapted(m, use_dora=use_dora)
        cls = DoRALinear if use_dora else LoRALinear
        layer = model.model.layers[1].mlp.down_proj
        assert type(layer) is cls and type(layer.linear) is QLinear
        before = {key: mx.array(value) for key, value in tree_flatten(stock.trainable_parameters())}
        assert_same_sums(step(model), step(stock))
        trained, expected = (dict(tree_flatten(m.trainable_parameters())) for m in (model, stock))
        assert trained.keys() == expected.keys()
        moved = sum(mx.abs(expected[key] - before[key]).sum().item() for key in before)
        apart = sum(mx.abs(expected[key] - trained[key]).sum().item() for key in before)
        assert moved > 0 and apart < TRAINED * moved
        # Fusing rounds to 4 bits: from the very same adapters, the same packed weights.
        model.load_weights(list(expected.items()), strict=False)
        assert_same(model, stock, "trained")
        for m in (model, stock):
            fused(m, dequantize)
        assert_equal(arrays(model), arrays(stock))
        assert_same(model, stock, "fused")
        plain = nn.Linear if dequantize else nn.QuantizedLinear
        assert type(model.model.layers[1].mlp.down_proj) is plain
        assert type(model.model.layers[1].mlp.up_proj) is QLinear
        if not dequantize:
            assert convert_model(model).counts["swapped"] == 2 * len(LORA_KEYS)
            assert_same(model, stock, "fused and converted again")

    def test_grad_checkpoint(self, model, stock, monkeypatch):
        for m in (model, stock):
            adapted(m)
        expected = step(stock)
        # It patches the class; this restores it.
        cls = type(model.layers[0])
        assert issubclass(cls, TransformerBlock)
        monkeypatch.setattr(cls, "__call__", cls.__call__)
        grad_checkpoint(model.layers[0])
        assert_same_sums(step(model), expected)
        assert_same(model, stock, "trained with checkpoints")

    def test_convert_an_adapted_model(self, stock):
        model = adapted(build("qwen2", QWEN))
        adapted(stock)
        step(stock)
        model.load_weights(list(arrays(stock).items()))
        report = convert_model(model, config=CONFIG)
        assert report.counts == {"swapped": 19} and not report.unmatched
        assert_same(model, stock, "converted with adapters")
        trainable = [key for key, _ in tree_flatten(stock.trainable_parameters())]
        assert [key for key, _ in tree_flatten(model.trainable_parameters())] == trainable
        assert all(key.endswith(("lora_a", "lora_b")) for key in trainable)
        remove_lora_layers(model)
        assert type(model.model.layers[0].self_attn.q_proj) is QLinear

    def test_embedding(self, model, stock):
        """The tied output goes through the adapter of the embedding."""
        for m in (model, stock):
            mx.random.seed(5)
            m.model.embed_tokens = LoRAEmbedding.from_base(m.model.embed_tokens, r=4, scale=2.0)
            m.model.embed_tokens.lora_b = mx.random.normal(m.model.embed_tokens.lora_b.shape)
        assert type(model.model.embed_tokens.embedding) is QEmbedding
        assert_same(model, stock, "adapted embedding")


def _mixed(path: str, module: nn.Module) -> bool | dict[str, int]:
    return {"group_size": 32, "bits": 6} if "down_proj" in path or "q_proj" in path else True


class TestTransformations:
    def test_dequantize_model(self, model, stock):
        for m in (model, stock):
            dequantize_model(m)
        assert not any(isinstance(m, nn.QuantizedLinear) for m in model.modules())
        assert_equal(arrays(model), arrays(stock))
        assert_same(model, stock, "dequantized")

    def test_quantize_again_in_the_same_format(self, model, stock):
        before = arrays(model)
        nn.quantize(model, 64, 4)
        assert not any(isinstance(m, QLinear) for m in model.modules())
        assert all(array is before[key] for key, array in arrays(model).items())
        assert_same(model, stock, "quantized again")

    @pytest.mark.parametrize("mixed", [False, True], ids=["uniform", "mixed"])
    def test_quantize_again_in_another_format(self, tmp_path, mixed):
        """The configuration describes the saved arrays: the model loads and computes the same."""
        config = {**CONFIG, "hidden_size": 256, "intermediate_size": 512}
        del config["quantization"]
        module = build("qwen2", QWEN._replace(config={"tie_word_embeddings": True, **config}))
        model, config = quantize_model(
            dequantize_model(module), config, 64, 4, quant_predicate=_mixed if mixed else None
        )
        convert_model(model, config=config)
        wanted = {"group_size": 32, "bits": 8, "mode": "affine"}
        model, config = quantize_model(
            model, config, 32, 8, quant_predicate=lambda path, m: "q_proj" not in path
        )
        again = [m for m in model.modules() if type(m) is nn.QuantizedLinear]
        assert len(again) == 12 and {(m.group_size, m.bits) for m in again} == {(32, 8)}
        assert sum(isinstance(m, QLinear) for m in model.modules()) == 2
        entries = [v for k, v in config["quantization"].items() if k.endswith("up_proj")]
        assert entries == [wanted] * 2
        save(tmp_path, tmp_path, model, TOKENIZER, config, donate_model=False)
        loaded, _ = load_model(tmp_path)
        assert_equal(arrays(loaded), arrays(model))
        assert_same(model, loaded, "quantized again")
        convert_model(loaded, config=tmp_path)

    def test_compile(self, model, stock):
        compiled = mx.compile(model)
        assert_same_model(compiled(TOKENS), stock(TOKENS), bits=None, what="compiled")
        step = mx.compile(lambda x: model(x).sum(), inputs=model.state)
        first = step(TOKENS).item()
        layer = model.model.layers[0].mlp.down_proj
        layer.scales = 2 * layer.scales
        assert step(TOKENS).item() != first

    def test_parameters(self, model, stock):
        assert_equal(arrays(model), arrays(stock))
        for m in (model, stock):
            m.freeze()
            m.model.layers[0].unfreeze(keys=["bias", "scales"])
        names = [[k for k, _ in tree_flatten(m.trainable_parameters())] for m in (model, stock)]
        assert names[0] == names[1] and len(names[0]) == 10
        half = [m.set_dtype(mx.bfloat16) or arrays(m) for m in (model, stock)]
        assert_equal(*half)
        assert len(model.leaf_modules()) == len(stock.leaf_modules())
