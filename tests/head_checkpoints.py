"""Checkpoints of heads for multi-token prediction under their published names, with random weights.

Names and shapes are those of DeepSeek-V3 (``model.layers.61``), GLM-4.5, Qwen3-Next and Qwen3.5
(``mtp``), MiMo-7B (``model.mtp_layers``) and MiMo-V2-Flash (``model.mtp.layers``).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from architecture_table import ARCHITECTURES
from architectures import Architecture, build, unquantized

D, INNER, EXPERTS, WIDE = 128, 192, 4, 64
_QKV = {"q_proj": (D, D), "k_proj": (64, D), "v_proj": (64, D), "o_proj": (D, D)}
_BIASES = {"q_proj.bias": (D,), "k_proj.bias": (64,), "v_proj.bias": (64,)}
_GATED = {**_QKV, "q_proj": (2 * D, D), "q_norm": (32,), "k_norm": (32,)}
_LATENT = {
    "q_a_proj": (64, D), "q_a_layernorm": (64,), "q_b_proj": (256, 64), "kv_b_proj": (256, 64),
    "kv_a_proj_with_mqa": (96, D), "kv_a_layernorm": (64,), "o_proj": (D, D),
}  # fmt: skip


def _mlp(inner: int, ahead: str = "") -> dict[str, tuple[int, ...]]:
    wide = {f"{ahead}{name}": (inner, D) for name in ("gate_proj", "up_proj")}
    return wide | {f"{ahead}down_proj": (D, inner)}


_ROUTED = {"gate": (EXPERTS, D)}
for _e in range(EXPERTS):
    _ROUTED |= _mlp(WIDE, f"experts.{_e}.")
_SIGMOID = {**_ROUTED, "gate.e_score_correction_bias": (EXPERTS,)} | _mlp(WIDE, "shared_experts.")
_SHARED = _mlp(WIDE, "shared_expert.") | {"shared_expert_gate": (1, D)}
_FUSED = {
    "gate": (EXPERTS, D), "experts.gate_up_proj@": (EXPERTS, 2 * WIDE, D),
    "experts.down_proj@": (EXPERTS, D, WIDE), **_SHARED,
}  # fmt: skip


class Family(NamedTuple):
    """An architecture, and how its checkpoints store heads."""

    layer: int  # of the model, which is of the kind of a head's
    # Shapes of a layer's arrays; a name without an ending is that of a weight.
    attention: dict[str, tuple[int, ...]]
    mlp: dict[str, tuple[int, ...]]
    ahead: str  # of the names of a head, with its number in the place of {}
    names: tuple[str, str, str, str]  # of enorm, hnorm, eh_proj and the last norm
    config: Mapping[str, Any] = MappingProxyType({})  # of its small model, beside the table's
    gemma: bool = False  # whether norms are stored without the 1 that is added to them


_NEXTN = "enorm", "hnorm", "eh_proj", "shared_head.norm"
_QWEN = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
_MIMO = "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
FAMILIES = {
    "deepseek_v3": Family(1, _LATENT, _SIGMOID, "model.layers.{2}", _NEXTN,
                          {"attention_bias": False}),
    "glm4_moe": Family(1, {**_QKV, **_BIASES, "q_norm": (32,), "k_norm": (32,)}, _SIGMOID,
                       "model.layers.{2}", _NEXTN),
    "glm4_moe_lite": Family(1, _LATENT, _SIGMOID, "model.layers.{2}", _NEXTN,
                            {"attention_bias": False}),
    "qwen3_next": Family(1, _GATED, _ROUTED | _SHARED, "mtp.layers.{0}", _QWEN,
                         {"attention_bias": False}, True),
    "qwen3_5": Family(1, _GATED, _mlp(INNER), "mtp.layers.{0}", _QWEN,
                      {"attention_bias": False, "num_experts": 0}, True),
    "qwen3_5_moe": Family(1, _GATED, _FUSED, "mtp.layers.{0}", _QWEN,
                          {"attention_bias": False}, True),
    "mimo": Family(1, {**_QKV, **_BIASES}, _mlp(INNER), "model.mtp_layers.{0}", _MIMO),
    "mimo_v2_flash": Family(0, {**_QKV, "attention_sink_bias@": (4,)}, _mlp(INNER),
                            "model.mtp.layers.{0}", ("enorm", "hnorm", "eh_proj",
                            "final_layernorm"), {"attention_bias": False}),
}  # fmt: skip


def model_of(name: str, quantized: bool = False, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The small model of a family."""
    known = ARCHITECTURES[name]
    architecture = Architecture(known.patched, {**known.config, **FAMILIES[name].config})
    return (build if quantized else unquantized)(name, architecture, dtype)


def _full(name: str) -> str:
    if name.endswith("@"):
        return name[:-1]
    return name if name.endswith(("bias", "weight")) else f"{name}.weight"


def layer_of(name: str, seed: int = 0) -> dict[str, mx.array]:
    """The weights of a decoder layer as checkpoints name them."""
    family, keys = FAMILIES[name], iter(mx.random.split(mx.random.key(seed), 64))
    shapes = {f"self_attn.{_full(n)}": shape for n, shape in family.attention.items()}
    shapes |= {f"mlp.{_full(n)}": shape for n, shape in family.mlp.items()}
    norms = "input_layernorm", "post_attention_layernorm"
    shapes |= {f"{n}.weight": (D,) for n in norms}
    found = {}
    for each, shape in shapes.items():
        array = mx.random.normal(shape, key=next(keys)) / max(shape[-1], 32) ** 0.5
        found[each] = array + (len(shape) == 1 and "norm" in each and not family.gemma)
    return found


def head_of(name: str, number: int = 0) -> dict[str, mx.array]:
    """The weights of a head by their full names."""
    family = FAMILIES[name]
    first = int(family.ahead[family.ahead.index("{") + 1 : -1])
    ahead = f"{family.ahead[: family.ahead.index('{')]}{first + number}"
    layer = layer_of(name, number)
    if name == "mimo_v2_flash":
        layer["pre_mlp_layernorm.weight"] = layer.pop("post_attention_layernorm.weight")
    found = {f"{ahead}.{each}": array for each, array in layer.items()}
    keys = mx.random.split(mx.random.key(100 + number), 4)
    outer = "mtp" if family.names is _QWEN else ahead
    for each, key in zip(family.names, keys, strict=True):
        wide = each in ("eh_proj", "fc", "input_proj")
        array = mx.random.normal((D, 2 * D) if wide else (D,), key=key) / (2 * D) ** 0.5
        found[f"{outer}.{each}.weight"] = array + (not wide and not family.gemma)
    if family.names is _NEXTN:  # their own copies of the model's, which nothing reads
        found[f"{ahead}.embed_tokens.weight"] = mx.zeros((D, D))
        found[f"{ahead}.shared_head.head.weight"] = mx.zeros((D, D))
    if name.startswith("qwen3_5"):
        found["model.language_model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((8, 1, 4))
    return found
