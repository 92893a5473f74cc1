"""Converted models of which each rank has a share, beside the same model in one process."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCABULARY, Architecture, build
from converted import add_adapters, decoded
from fine_tuning import losses
from machine import on_a_gpu
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from numerics import assert_same_losses, assert_same_model, assert_same_states
from ranks import run
from tiny_model import save_tiny_model

import mlx_qlayers
from mlx_qlayers import convert_model, revert_model, use_backend
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.conversion.sharding import shard_model
from mlx_qlayers.decode.engine import stopped
from mlx_qlayers.layers.sharded import QAllToShardedLinear, QShardedToAllLinear
from mlx_qlayers.layers.switch_linear import QSwitchLinear
from mlx_qlayers.measurements.entries import Entry, own_entries, unsaved
from mlx_qlayers.runtime.ranks import RanksError, gathered
from mlx_qlayers.runtime.transformed import uncompiled
from mlx_qlayers.tuning.calibrate import _adopt

HYBRID = {"full_attention_interval": 2}
# Heads and widths that ranks do not divide.
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 224}
WIDE = {"linear_num_key_heads": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
WIDE |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
STEPS, BATCH = 6, 4


def built(name: str, **config: object) -> nn.Module:
    return build(name, Architecture(0, dict(config), format=(32, 4, "affine")))


def check(name: str, how: str, group: mx.distributed.Group, **config: object) -> nn.Module:
    """The converted model, after its logits were held against those of the whole stock one."""
    stock, model = (built(name, **config) for _ in range(2))
    if how == "before":
        convert_model(model, verify=False)
        model.shard(group)
    elif how == "after":  # by mlx-lm itself
        model.shard(group)
        convert_model(model)
    else:
        shard_model(model, group, experts=how == "experts")
        convert_model(model, verify=False)
    found, expected = (decoded(each, steps=2) for each in (model, stock))
    assert_same_model(found, expected, bits=None, what=f"{name} {how} {config}")
    return model


def lora(folder: Path) -> list[float]:
    """Losses of a fine-tuned model, with batches that all ranks share."""
    model = built("llama")
    convert_model(model)
    add_adapters(model, 2)
    text = random.Random(3).choices(range(VOCABULARY), k=400)
    return losses(model, text, folder, STEPS, 8, BATCH)


def two_ranks(folder: str) -> dict:
    """All that two ranks are asked, in one start."""
    group = mx.distributed.init()
    with use_backend("reference"):  # kernels that would take long to compile change nothing here
        with uncompiled():  # nor what each rank would compile of mlx-lm's small functions
            check_all(Path(folder), group)
        found = lora(Path(folder))
    check_gpu_path(group)
    return {"losses": found}


def check_all(folder: Path, group: mx.distributed.Group) -> None:
    check_layers(group)
    check_refusals(group)
    check("qwen3_moe", "after", group)
    for how in ("before", "experts"):
        moe = check("qwen3_moe", how, group)
        experts = [m for m in moe.modules() if isinstance(m, QuantizedSwitchLinear)]
        assert len(experts) == 6 and all(type(m) is QSwitchLinear for m in experts)
        assert len(experts[0].weight) == (4 if how == "before" else 2)
    check("qwen3_5", "before", group, **HYBRID)
    check("llama", "uneven", group, **UNEVEN)
    check_files(folder, group)
    check_agreement(group)


def check_layers(group: mx.distributed.Group) -> None:
    """Classes, report, gradients and the way back of a dense model."""
    check("llama", "after", group)
    model, stock = check("llama", "before", group), built("llama")
    block, whole = model.layers[0], stock.layers[0]
    kinds = {type(m) for m in block.modules()}
    assert {QAllToShardedLinear, QShardedToAllLinear} <= kinds
    rows = {row.path: row for row in convert_model(model).rows}
    own = f"of rank {group.rank()} of 2"
    assert rows["model.layers.0.self_attn.q_proj"].reason == f"rows {own}"
    assert rows["model.layers.0.mlp.down_proj"].reason == f"columns {own}, added up"
    for length in (3, 20):  # fused, and one layer after the other
        x = mx.random.normal((1, length, 128), key=mx.random.key(0))
        grads = []
        for each in (whole, block):
            norm = each.input_layernorm

            def loss(x: mx.array, weight: mx.array, each=each, norm=norm) -> mx.array:
                norm.weight = weight
                return (each(x, "causal") ** 2).sum()

            grads.append(mx.grad(loss, argnums=(0, 1))(x, norm.weight))
        for ours, theirs in zip(*reversed(grads), strict=True):
            assert_same_states(ours, theirs, bits=None, what=f"gradient of {length} rows")
    revert_model(model)
    assert type(model) is llama.Model
    assert not any(isinstance(m, QAllToShardedLinear) for m in model.modules())
    assert_same_model(decoded(model), decoded(stock), bits=None, what="reverted")


def check_refusals(group: mx.distributed.Group) -> None:
    """A module that cannot be split is named, and nothing is changed."""
    cases = {
        r"switch_mlp\.down_proj: 4x128x32 in groups of 32 cannot be split among 2 ranks": (
            "qwen3_moe",
            {"moe_intermediate_size": 32},
        ),
        "num_k_heads cannot be split among 2 ranks": ("qwen3_5", {"linear_num_key_heads": 1}),
        "no tensor parallel layers for mlx_lm.models.phi3": ("phi3", {}),
    }
    for message, (name, config) in cases.items():
        model = built(name, **config)
        before = {path: array.shape for path, array in tree_flatten(model.parameters())}
        with pytest.raises(ValueError, match=message):
            shard_model(model, group)
        assert before == {path: array.shape for path, array in tree_flatten(model.parameters())}


def check_gpu_path(group: mx.distributed.Group) -> None:
    """Steps as one graph, with sums over the ranks inside: compiled, then by kernels."""
    for backend in ("reference", "host"):
        with on_a_gpu(), use_backend(backend), uncompiled(backend == "host"):
            assert stopped(check("llama", "after", group)) is None


def check_files(folder: Path, group: mx.distributed.Group) -> None:
    """Each rank reads its share, and all stop together where they do not have the same."""
    sizes = {"num_hidden_layers": 6, "dtype": mx.float32}
    even, uneven = {"hidden_size": 256, "intermediate_size": 512}, {"hidden_size": 192}
    paths = [folder / name for name in ("model", "uneven", "other")]
    if group.rank() == 0:
        save_tiny_model(paths[0], **sizes, **even)
        save_tiny_model(paths[1], **sizes, **uneven, num_attention_heads=6, num_key_value_heads=3)
        save_tiny_model(paths[2], **sizes, **even, seed=1)
    gathered(group, "written")
    tokens = mx.array([[3, 1, 4, 1, 5]])
    for path, parallel in ((paths[0], "tensor"), (paths[0], "pipeline"), (paths[1], "tensor")):
        whole, _ = mlx_qlayers.load(path, calibrate=False, verify=False)
        layer = sum(array.nbytes for _, array in tree_flatten(whole.layers[0].parameters()))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        model = load_stock(path, group=group, parallel=parallel).model
        share = mx.get_active_memory() - before
        assert share < 0.8 * before, (share, before)
        assert mx.get_peak_memory() - before <= share + layer
        convert_model(model)
        caches = make_prompt_cache(whole), make_prompt_cache(model)
        found = [m(tokens, cache=c) for m, c in zip((whole, model), caches, strict=True)]
        assert_same_model(*reversed(found), bits=None, what=f"{path.name} {parallel}")
        del whole, model, caches, found
        mx.clear_cache()
    first = group.rank() == 0
    with pytest.raises(RanksError, match=r"rank 1 differs from rank 0: weights \("):
        mlx_qlayers.load(paths[0 if first else 2], group=group)
    with pytest.raises(RanksError, match=r"rank 1: FileNotFoundError: .*absent"):
        mlx_qlayers.load(paths[0] if first else folder / "absent", group=group)
    with pytest.raises(ValueError, match="one of tensor, pipeline, experts, not 'other'"):
        mlx_qlayers.load(paths[0], group=group, parallel="other")


def check_agreement(group: mx.distributed.Group) -> None:
    """All ranks take what rank 0 has measured, and nothing else."""
    entry = Entry({"rows": group.rank()}, "kernel", 1e-3, 2e-3, 1, "hash", "0")
    unsaved["somewhere"] = {f"of rank {group.rank()}": entry}
    _adopt("somewhere", group)
    (found,) = (entry.config["rows"] for entry in own_entries("somewhere").values())
    assert found == 0


def four_ranks() -> None:
    """All that four ranks are asked."""
    with use_backend("reference"), uncompiled():
        check_more(mx.distributed.init())


def check_more(group: mx.distributed.Group) -> None:
    """More ranks than heads of keys, experts that are uneven, and stages of a pipeline."""
    check("llama", "before", group, num_key_value_heads=2)  # each twice
    check(
        "qwen3_moe", "experts", group, num_experts=6, num_attention_heads=8, num_key_value_heads=4
    )
    model, stock = (built("qwen3_moe", num_hidden_layers=5) for _ in range(2))
    model.model.pipeline(group)
    convert_model(model, verify=False)
    assert len(model.layers) == (2 if group.rank() == 0 else 1)
    found, expected = (decoded(each, steps=1) for each in (model, stock))
    assert_same_model(found, expected, bits=None, what="pipeline")
    assert isinstance(model, qwen3_moe.Model)


def test_heads_that_share_a_group():
    three: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    model = built("llama", num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    with pytest.raises(ValueError, match="4 parts of 128x32 in groups of 32 cannot be made 6"):
        shard_model(model, three)


def test_two_ranks(tmp_path):
    with use_backend("reference"), mx.stream(mx.cpu):
        one = lora(tmp_path)
    assert len(one) == STEPS and one[-1] != one[0]
    for rank in run(two_ranks, 2, str(tmp_path)):
        assert_same_losses(rank["losses"], one)


def test_four_ranks():
    run(four_ranks, 4)
