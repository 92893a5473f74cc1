"""Heads for multi-token prediction: their layouts, their forward pass, and texts with them."""

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from head_checkpoints import FAMILIES, D, head_of, layer_of, model_of
from mlx_lm import load
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from numerics import assert_same_model, to64
from texts import guessed, plain, rounds_of

from mlx_qlayers import convert_model, load_heads
from mlx_qlayers.layers.qlinear import Counterpart
from mlx_qlayers.speculation.heads import PredictionHeads
from mlx_qlayers.speculation.loop import Speculation, batch, speculative_generate_step

PROMPT = mx.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], mx.uint32)


def saved(tmp_path: Any, weights: dict[str, mx.array]) -> str:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    return str(tmp_path)


def owner_of(model: Any) -> Any:
    return getattr(model, "language_model", model)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_what_its_architecture_says(name, tmp_path):
    """Norms and projection by float64, and a layer as mlx-lm loads one of these weights."""
    model, family, raw = model_of(name), FAMILIES[name], head_of(name)
    heads = load_heads(saved(tmp_path, raw), model)
    layer = {f"model.layers.{family.layer}.{n}": array for n, array in layer_of(name).items()}
    layer |= {n: array for n, array in raw.items() if "conv1d" in n}
    loaded = {n: a for n, a in model.sanitize(layer).items() if "conv1d" not in n}
    model.load_weights([*loaded.items()], strict=False)
    block = owner_of(model).model.layers[family.layer]

    outer = next(n for n in raw if n.endswith(f".{family.names[2]}.weight")).rsplit(".", 2)[0]
    embedding_norm, hidden_norm, projection, norm = (
        to64(raw[f"{outer}.{each}.weight"]) for each in family.names
    )
    one = float(family.gemma)
    e, h = (mx.random.normal((1, 5, D), key=mx.random.key(i)) for i in (7, 8))
    pair = [rms_norm(to64(e), embedding_norm + one), rms_norm(to64(h), hidden_norm + one)]
    if name == "mimo":
        pair.reverse()
    x = mx.array((np.concatenate(pair, -1) @ projection.T).astype(np.float32))
    cache, window = KVCache(), 8 if name == "mimo_v2_flash" else None
    mask = create_attention_mask(x, cache, window_size=window, return_array=True)
    out = mx.array(rms_norm(to64(block(x, mask, cache)), norm + one).astype(np.float32))

    (head,) = heads.layers
    own = KVCache()
    found = [head.normal(head(e[:, part], h[:, part], own)) for part in (slice(3), slice(3, 5))]
    assert_same_model(mx.concatenate(found, axis=1), out, bits=None, what=name)


def chained(heads: Any, tokens: list[int], hidden: mx.array, depth: int) -> list[int]:
    """Guesses without caches: each head takes all hidden states anew."""
    guesses: list[int] = []
    states, trunk = hidden[None], heads.trunk
    rows, taken = states, 0
    for j in range(depth):
        head, text = heads.layers[min(j, len(heads.layers) - 1)], [*tokens, *guesses]
        if j < len(heads.layers):
            rows, taken = states, j + 1
        else:  # the last one goes on from what it made
            rows = mx.concatenate([rows, states[:, -1:]], axis=1)
        ids = mx.array([text[taken : taken + rows.shape[1]]])
        states = head(trunk.embed(ids), rows, KVCache())
        logits = trunk.tapped.logits(head.normal(states[:, -1:]))
        guesses.append(int(logits.argmax().item()))
    return guesses


@pytest.mark.parametrize(("name", "count"), [("mimo", 1), ("mimo_v2_flash", 3)])
def test_guesses_are_those_without_caches(name, count, tmp_path):
    """Whatever was guessed before, in whatever pieces the hidden states came."""
    model, raw = model_of(name), {}
    for number in range(count):
        raw |= head_of(name, number)
    heads = load_heads(saved(tmp_path, raw), model)
    assert len(heads.layers) == count
    source, trunk = PredictionHeads(heads), heads.trunk
    text = mx.random.randint(0, 128, (90,), key=mx.random.key(2)).tolist()
    hidden = trunk.tapped.hidden(mx.array([text]), make_prompt_cache(model))[0]

    def draw(logits: mx.array, guesses: list[mx.array]) -> mx.array:
        return logits.argmax(-1)

    assert not source.ready(text[:1])
    seen = 0
    for end, depth in ((2, 5), (3, 1), (7, 4), (8, 6), (80, 2), (81, 5)):
        for start in range(max(seen - 2, 0), end - 1, 40):  # some of them again
            source.observe(text[:end], start, hidden[start : min(start + 40, end - 1)])
        seen = end - 1
        assert source.ready(text[:end])
        found = source.propose(text[:end], depth, draw).tolist()
        assert found == chained(heads, text[:end], hidden[: end - 1], depth)


@pytest.mark.parametrize(
    ("name", "temp"),
    [*((name, 0.0) for name in FAMILIES), ("mimo", 1.0)]
    + [pytest.param(n, 1.0, marks=pytest.mark.caches) for n in FAMILIES if n != "mimo"],
)
def test_the_text_is_that_without_heads(name, temp, tmp_path):
    """With caches and states of all kinds; sampled by graphs and converted layers."""
    model = model_of(name, quantized=True)
    if temp:
        convert_model(model, verify=False, calibrate=False)
    heads = load_heads(saved(tmp_path, head_of(name)), model)
    layers = dict(owner_of(model).model.layers[FAMILIES[name].layer].named_modules())
    for path, module in heads.layers[0].block.named_modules():
        if path in layers and "weight" in module:
            like = layers[path]
            assert [module.get("scales") is None] == [like.get("scales") is None], path
            assert isinstance(module, Counterpart) == isinstance(like, Counterpart), path
            if "scales" in module:
                assert (module.bits, module.mode) == (like.bits, like.mode)
    assert "scales" in heads.layers[0].eh_proj
    sampler, length = make_sampler(temp=temp), 24
    speculation = Speculation(measured=False, heads=heads)
    found = guessed(model, PROMPT, length, speculation, sampler=sampler)
    assert found == plain(model, PROMPT, length, sampler=sampler)
    assert speculation.report.guesses >= length


def test_heads_of_a_batch_invariant_model_in_bfloat16(tmp_path):
    model = model_of("mimo", quantized=True, dtype=mx.bfloat16)
    convert_model(model, verify=False, calibrate=False, batch_invariant=True)
    heads = load_heads(saved(tmp_path, head_of("mimo")), model)
    speculation = Speculation(measured=False, heads=heads)
    assert guessed(model, PROMPT, 24, speculation) == plain(model, PROMPT, 24)
    assert speculation.report.guesses


def of_embeddings_alone(name: str) -> tuple[Any, dict[str, mx.array]]:
    """A model that goes by its last token alone, and a head that does what the model does."""
    model, raw = model_of(name), head_of(name)
    for layer in model.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.weight *= 0
    for each in raw:
        if each.endswith(("o_proj.weight", "down_proj.weight")):
            raw[each] *= 0
        elif each.endswith("layernorm.weight"):
            raw[each] = mx.ones_like(raw[each])
        elif each.endswith("input_proj.weight"):
            raw[each] = mx.concatenate([mx.zeros((D, D)), mx.eye(D)], axis=1)
    ahead = "model.mtp_layers.0."
    raw[f"{ahead}final_layernorm.weight"] = model.model.norm.weight
    return model, raw


def test_a_head_that_knows_the_model_is_always_right(tmp_path):
    """So the token behind the next is guessed from the next one, and nothing else is shifted."""
    model, raw = of_embeddings_alone("mimo")
    heads = load_heads(saved(tmp_path, raw), model)
    prompts, length = [PROMPT.tolist(), PROMPT.tolist()[:4]], 20
    right = [plain(model, prompt, length) for prompt in prompts]
    speculation = Speculation(prompt_lookup=False, measured=False, heads=heads)
    sources = [speculation.sources() for _ in prompts]
    run = rounds_of(model, prompts, sources, 4, heads.trunk)
    assert batch(run, (), length) == right
    assert run.report.accepted == run.report.guesses >= 30, run.report


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_of_a_repository_only_heads_are_downloaded(name, tmp_path, monkeypatch):
    """By its index; files are those of a fake, which has heads and the rest apart."""
    model, asked = model_of(name), []
    weights = head_of(name) | {"model.layers.1.mlp.gate.weight": mx.ones((4, D))}
    weights["model.layers.1.linear_attn.conv1d.weight"] = mx.ones((4, 1, D))
    files = {n: f"model-{'2' if n in head_of(name) else '1'}.safetensors" for n in weights}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))

    def download(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append([*allow_patterns])
        if allow_patterns[0].startswith("model-2"):
            heads = {n: a for n, a in weights.items() if files[n] == allow_patterns[0]}
            mx.save_safetensors(str(tmp_path / allow_patterns[0]), heads)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    heads = load_heads("owner/name", model)
    assert len(heads.layers) == 1
    assert asked == [[index.name], ["model-2.safetensors"]]


def test_heads_that_are_refused(tmp_path, tiny_model):
    stock, _ = load(str(tiny_model))
    with pytest.raises(ValueError, match="qwen2: heads are known of deepseek_v3"):
        load_heads(str(tiny_model), stock)
    model = model_of("mimo")
    path = saved(tmp_path, {"model.norm.weight": mx.ones(4)})
    with pytest.raises(ValueError, match="no heads: no weight has a name like"):
        load_heads(path, model)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load_heads(str(tmp_path / "none" / "of" / "these"), model)
    heads = load_heads(saved(tmp_path, head_of("mimo")), model)
    with pytest.raises(ValueError, match="the heads are of another model"):
        next(speculative_generate_step(PROMPT, stock, Speculation(heads=heads)))
