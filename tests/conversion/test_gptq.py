"""Models quantized by calibration: what is written, what it costs, and what a stop leaves."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import qwen2_moe
from tiny_model import CONFIG, TEXT

from mlx_qlayers.conversion import gptq
from mlx_qlayers.conversion.gptq import Calibration, mixture, quantize_model, windows
from mlx_qlayers.conversion.layer_stream import stages
from mlx_qlayers.conversion.quantize import quantize_calibrated
from mlx_qlayers.formats import Format
from tests.numerics import to64

SHORT = Calibration(samples=4, length=32)
WORDS = TEXT * 4


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(WORDS)
    return file


def test_what_is_written_is_a_model_of_mlx_lms(plain_model, text, tmp_path):
    target = tmp_path / "model"
    written = quantize_calibrated(
        plain_model, target, text=text, bits=3, group_size=32, calibration=SHORT
    )
    assert written.layers == 15
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "text.txt"]
    model, tokenizer = mlx_lm.load(str(target))
    layer = model.layers[1].mlp.down_proj
    assert (layer.bits, layer.group_size, layer.scales.dtype) == (3, 32, mx.bfloat16)
    config = json.loads((target / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 3, "mode": "affine"}
    assert mlx_lm.generate(model, tokenizer, prompt="Once", max_tokens=2)
    with pytest.raises(ValueError, match="already quantized"):
        quantize_calibrated(target, tmp_path / "other", text=text, calibration=SHORT)


def test_hessians_are_those_of_the_layers_before_as_they_are_by_then(plain_model):
    model, tokenizer = mlx_lm.load(str(plain_model))
    batches = mx.split(windows(tokenizer.encode(WORDS), 4, 32), 2)
    found = {}
    for stage in stages(model, batches):
        found |= stage.hessians()
        if stage.number == 0:
            for module in stage.modules.values():
                module.weight = mx.zeros_like(module.weight)
    attention = "model.layers.1.self_attn"
    assert found[f"{attention}.q_proj"] is found[f"{attention}.v_proj"]
    # The first layer adds nothing but its biases any more.
    hidden = [model.layers[0](model.model.embed_tokens(b), "causal", None) for b in batches]
    rows = to64(
        mx.concatenate([model.layers[1].input_layernorm(h) for h in hidden]).reshape(-1, 128)
    )
    h = to64(found[f"{attention}.q_proj"])
    assert abs(h - rows.T @ rows).max() <= 1e-5 * abs(h).max()


def test_experts_have_the_inputs_that_chose_them(monkeypatch):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sizes |= {"shared_expert_intermediate_size": 64, "vocab_size": 50, "num_hidden_layers": 1}
    sizes |= {"model_type": "qwen2_moe", "tie_word_embeddings": False}
    mx.random.seed(0)
    model = qwen2_moe.Model(qwen2_moe.ModelArgs.from_dict(CONFIG | sizes))
    tokens = mx.random.randint(0, 50, (2, 16))
    found = {}
    for stage in stages(model, [tokens]):
        found |= stage.hessians()
    path = "model.layers.0.mlp"
    experts, shared = found[f"{path}.switch_mlp.up_proj"], found[f"{path}.shared_expert.up_proj"]
    assert experts.shape == (4, 128, 128)
    assert mx.allclose(experts.sum(axis=0), 2 * shared, rtol=1e-4, atol=1e-4)
    assert found["lm_head"].shape == (128, 128)

    def wish(path: str, _: object) -> bool | dict[str, int]:
        return {"group_size": 64, "bits": 8} if path.endswith("mlp.gate") else True

    monkeypatch.setattr(qwen2_moe.Model, "quant_predicate", staticmethod(wish), raising=False)

    class Words:
        def encode(self, text: str) -> list[int]:
            return tokens.flatten().tolist()

    entries = quantize_model(
        model, Words(), text="", group_size=32, bits=4, calibration=Calibration(2, 16)
    )
    assert entries["model.layers.0.mlp.gate"]["bits"] == 8  # as the model wishes
    assert model.layers[0].mlp.switch_mlp.up_proj.bits == 4
    assert mx.isfinite(model(tokens)).all()


def test_a_stop_costs_no_finished_layer(plain_model, text, tmp_path, monkeypatch):
    options = {"text": text, "bits_per_weight": 5.0, "group_size": 32, "calibration": SHORT}
    whole = quantize_calibrated(plain_model, tmp_path / "whole", **options)
    assert 4.0 < whole.bits_per_weight <= 5.0
    saved, save = [], mx.save_safetensors

    def counted(path, *args, **kwargs):
        saved.append(Path(path).name)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(path, *args, **kwargs)

    monkeypatch.setattr(mx, "save_safetensors", counted)
    with pytest.raises(KeyboardInterrupt):
        quantize_calibrated(plain_model, tmp_path / "model", **options)
    assert not (tmp_path / "model").exists()
    (folder,) = tmp_path.glob(".model.gptq-*")
    (folder / "layer-0001.part.safetensors").write_bytes(b"cut short")
    quantize_calibrated(plain_model, tmp_path / "model", **options)
    first, second = (f"layer-000{n}.part.safetensors" for n in range(2))
    assert saved == [first, second, second, "model.safetensors"]
    ours, theirs = (mx.load(str(tmp_path / n / "model.safetensors")) for n in ("model", "whole"))
    assert all(mx.array_equal(a, theirs[name]) for name, a in ours.items())
    assert not folder.exists()


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-9], lambda raw: b"", lambda raw: b"\xff" * 80]
)
def test_what_is_damaged_is_made_again(damage, tmp_path):
    settings = ["a"]
    store = gptq._Store(tmp_path, settings)
    store.save(0, {"x": mx.arange(5)})
    assert store.once("losses", lambda: {"a": 1}) == {"a": 1}
    for file in (tmp_path / "layer-0000.safetensors", tmp_path / "losses.json"):
        file.write_bytes(damage(file.read_bytes()))
    again = gptq._Store(tmp_path, settings)
    assert again.load(0) is None
    for _ in range(2):
        assert again.once("losses", lambda: {"a": 2}) == {"a": 2}
    (tmp_path / "settings.json").write_bytes(b"\xff")
    gptq._Store(tmp_path, settings)
    assert [file.name for file in tmp_path.iterdir()] == ["settings.json"]


def test_bits_go_where_they_are_worth_most(plain_model):
    model, _ = mlx_lm.load(str(plain_model), lazy=True)
    paths = [p for p, m in model.named_modules() if hasattr(m, "to_quantized")]
    formats = dict.fromkeys(paths, Format(32, 4))
    costly, *others = [p for p in paths if "layers" in p]
    losses = {p: {str(b): 2.0 ** (-2 * b) for b in (2, 3, 4, 5, 6, 8)} for p in others}
    losses[costly] = {key: 1000 * value for key, value in losses[others[0]].items()}
    chosen = mixture(model, losses, formats, 5.0)
    assert chosen[costly].bits > max(chosen[p].bits for p in others)
    with pytest.raises(ValueError, match=r"2\.5 bits per weight are too few: 2 a layer take"):
        mixture(model, losses, formats, 2.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "awq"}, "method must be 'gptq' or 'rtn'"),
        ({"bits": 7}, "bits must be"),
        ({"method": "rtn", "bits_per_weight": 4.0}, "needs method 'gptq'"),
        ({"text": "too short"}, "a sequence is 32"),
        ({"bits_per_weight": 1.0}, "1.0 bits per weight are too few"),
        ({"bits_per_weight": float("nan")}, "nan bits per weight are too few"),
    ],
)
def test_wrong_arguments(plain_model, options, message):
    model, tokenizer = mlx_lm.load(str(plain_model), lazy=True)
    with pytest.raises(ValueError, match=message):
        quantize_model(model, tokenizer, **{"text": WORDS, "calibration": SHORT} | options)
