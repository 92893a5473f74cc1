"""The heads for multi-token prediction of a checkpoint, which mlx-lm's loaders drop.

Each architecture stores them under names of its own. They are renamed as a layer of the model, go
through mlx-lm's ``sanitize`` like one, and become a :class:`~mlx_qlayers.speculation.heads.Head`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..decode.twin import is_stepped
from ..layers.qlinear import Counterpart
from ..runtime.staging import expanded
from ..speculation.heads import Head, Heads
from .checkpoint import INDEX, read_header
from .loading import find_model

_NORMS = ("enorm", "hnorm", "norm")
# By this name mlx-lm knows a norm, and adds 1 to its weight where checkpoints leave that out.
_AS_NORM = ".input_layernorm"


class HeadLayout(NamedTuple):
    """How an architecture stores heads."""

    layers: str  # the pattern of their names: the number of a head, and the part of it
    parts: dict[str, str]  # what parts are called here; all others are those of a decoder layer
    shared: str = "$"  # the pattern of the names of parts that all heads have
    first: bool = False  # whether the numbers begin behind those of the model's layers
    embedding_first: bool = True  # see `Head`, also for `normed`
    normed: bool = True


_NEXTN = HeadLayout(
    r"model\.layers\.(\d+)\.(.+)",
    {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
    first=True,
    normed=False,
)
_QWEN = HeadLayout(
    r"mtp\.layers\.(\d+)\.(.+)",
    {
        "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj",
        "norm": "norm",
    },
    shared=r"mtp\.((?:fc|norm|pre_fc_norm_\w+)\..+)",
)  # fmt: skip
_MIMO = HeadLayout(
    r"model\.mtp_layers\.(\d+)\.(.+)",
    {
        "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj",
        "final_layernorm": "norm",
    },
    embedding_first=False,
)  # fmt: skip
_MIMO_V2 = HeadLayout(
    r"model\.mtp\.layers\.(\d+)\.(.+)",
    {
        "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
    },
)  # fmt: skip
LAYOUTS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _NEXTN),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_V2,
}
# The embeddings and the output layer of DeepSeek's heads are those of the model.
_MODELS_OWN = ("embed_tokens", "shared_head.head")


def layout_of(model: Any) -> HeadLayout:
    """How checkpoints of a model store heads; a ``ValueError`` if that is not known."""
    kind = getattr(model, "model_type", type(model).__name__)
    if kind not in LAYOUTS:
        raise ValueError(
            f"{kind}: heads are known of {', '.join(LAYOUTS)}; use a draft model or look-ups"
        )
    return LAYOUTS[kind]


def find_heads(name: str | os.PathLike[str], model: Any, revision: str | None = None) -> Path:
    """A directory or a file with heads; of a repository of the Hub no other weights are loaded."""
    layout, owner = layout_of(model), getattr(model, "language_model", model)
    options: dict[str, Any] = {"revision": revision}
    path = find_model(name, **options, patterns=[INDEX])
    if expanded(os.fspath(name)).exists():
        return path
    if not (path / INDEX).exists():
        return find_model(name, **options)
    files: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    wanted = {f for n, f in files.items() if _place(n, layout, len(owner.model.layers))}
    return find_model(name, **options, patterns=sorted(wanted)) if wanted else path


def read_heads(path: Path, model: Any) -> Heads:
    """The heads of a model from a directory or a file, quantized like its layers.

    A ``ValueError`` says that the architecture has none that are known, or the files have none.
    """
    layout, owner = layout_of(model), getattr(model, "language_model", model)
    found = _sanitized(model, _raw(path, layout, len(owner.model.layers)))
    if not found:
        raise ValueError(
            f"{path}: no heads: no weight has a name like {layout.layers}; checkpoints that "
            "mlx-lm has converted lack them, so name the one that was converted"
        )
    last = max(int(at[0]) for at in [*found])
    layers = [_head(owner, layout) for _ in range(last + 1)]
    heads = Heads(model, layers)
    weights = {f"layers.{n}.{part}": array for (n, part), array in found.items()}
    _load(heads, weights, _formats(owner.model))
    return heads


def _raw(path: Path, layout: HeadLayout, layers: int) -> dict[str, mx.array]:
    """The weights of heads under the names of the model's first layers."""
    read: dict[str, mx.array] = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        read_header(file)
        found: Any = mx.load(str(file))
        read.update(found)
    weights, shared, most = dict[str, mx.array](), dict[str, mx.array](), 0
    for name, array in read.items():
        place = _place(name, layout, layers)
        if place is None:
            continue
        number, part = place
        if number is None:
            shared[_renamed(part, layout)] = array
        elif number < 0:
            weights[name] = array
        else:
            weights[f"model.layers.{number}.{_renamed(part, layout)}"] = array
            most = max(most, number)
    for number in range(most + 1):
        weights |= {f"model.layers.{number}.{name}": array for name, array in shared.items()}
    return weights


def _place(name: str, layout: HeadLayout, layers: int) -> tuple[int | None, str] | None:
    """The number of a head, or None for all, and the part of it that a weight is; else None."""
    bare = re.sub(r"^(model\.)?language_model\.(?=mtp)", "", name)
    if match := re.fullmatch(layout.layers, bare):
        number = int(match[1]) - (layers if layout.first else 0)
        return (number, match[2]) if number >= 0 and not match[2].startswith(_MODELS_OWN) else None
    if match := re.fullmatch(layout.shared, bare):
        return None, match[1]
    # By its shape mlx-lm tells whether norms lack the 1 that is added; one layer has to do.
    return (-1, name) if layout is _QWEN and ".layers.0.linear_attn.conv1d.w" in name else None


def _renamed(part: str, layout: HeadLayout) -> str:
    for name, ours in layout.parts.items():
        if part.startswith(f"{name}."):
            norm = _AS_NORM if ours in _NORMS else ""
            return f"{ours}{norm}{part.removeprefix(name)}"
    return part


def _sanitized(model: Any, weights: dict[str, mx.array]) -> dict[tuple[str, str], mx.array]:
    """The weights by the number of the head and the name there, as mlx-lm has those of layers."""
    stacks: dict[tuple[str, str], dict[int, mx.array]] = {}
    found = dict[tuple[str, str], mx.array]()
    for name, array in model.sanitize(weights).items():
        match = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", name)
        if match is None or "conv1d" in name:
            continue
        part = match[2].replace(_AS_NORM, "") if match[2].startswith(_NORMS) else match[2]
        if not part.startswith((*_NORMS, "eh_proj")):
            part = f"block.{part}"
        if expert := re.fullmatch(r"(.+\.)experts\.(\d+)(\..+)", part):
            joined = match[1], f"{expert[1]}switch_mlp{expert[3]}"
            stacks.setdefault(joined, {})[int(expert[2])] = array
        else:
            found[match[1], part] = array
    return found | {at: mx.stack([a for _, a in sorted(e.items())]) for at, e in stacks.items()}


def _head(owner: Any, layout: HeadLayout) -> Head:
    """A head with a decoder layer that attends to all tokens, or in MiMo's V2 to a window."""
    args, last, options = owner.args, owner.model.layers[-1], dict[str, Any]()
    if layout is _MIMO_V2:
        block, options["window_size"] = type(last)(args, False, True), args.sliding_window_size
    elif layout is _MIMO:
        block = type(last)(args)
    else:
        number = args.full_attention_interval - 1 if layout is _QWEN else args.num_hidden_layers
        block = type(last)(args, number)
        options["return_array"] = layout is _NEXTN
    norm = owner.model.norm
    way = layout.embedding_first, layout.normed
    return Head(block, norm["weight"].size, norm.eps, *way, **options)


def _formats(inner: Any) -> dict[str, Any]:
    """The quantization of the model's layers by their parts, and under "" that of most."""
    found: dict[str, Any] = {}
    for layer in inner.layers:
        for part, module in layer.named_modules():
            if "scales" in module:
                names = ("group_size", "bits", "mode")
                found[part] = {name: getattr(module, name) for name in names}
            elif "weight" in module:
                found.setdefault(part, None)
    known = Counter(tuple(each.items()) for each in found.values() if each)
    return found | {"": dict(known.most_common(1)[0][0]) if known else None}


def _load(heads: Heads, weights: dict[str, mx.array], formats: dict[str, Any]) -> None:
    """Put weights into heads, of which those that were quantized stay so."""
    from mlx_lm.utils import infer_quant_config

    def as_read(path: str, module: nn.Module) -> Any:
        is_packed = f"{path}.scales" in weights and hasattr(module, "to_quantized")
        return is_packed and infer_quant_config(path, module, weights)

    def like_the_model(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        entry = formats.get(re.sub(r".*\bblock\.", "", path), formats[""])
        return entry if entry and module["weight"].shape[-1] % entry["group_size"] == 0 else False

    nn.quantize(heads, class_predicate=as_read)
    heads.load_weights([*weights.items()])
    nn.quantize(heads, class_predicate=like_the_model)
    heads.eval()


def is_converted(model: nn.Module) -> bool:
    """Whether a model has layers of this package, so that its heads are to have some."""
    return is_stepped(model) or any(isinstance(m, Counterpart) for m in model.modules())
