"""Calibrated quantization of a model: GPTQ layer by layer, and bits by sensitivity."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..formats import Format
from ..ops.gptq import gptq, nearest
from ..runtime.staging import replace_file
from .checkpoint import read_header, read_json
from .layer_stream import layers_of, stages

# Bits between which a mixture chooses.
_WIDTHS = (2, 3, 4, 5, 6, 8)
# Sequences of the calibration text, on a GPU and on a CPU.
_SAMPLES, _SAMPLES_CPU = 128, 24
_BATCH = 4
_ARRAYS = "weight", "scales", "biases"


@dataclass(frozen=True)
class Calibration:
    """How GPTQ calibrates.

    Attributes:
        samples: sequences of the text; by default 128, on a CPU 24.
        length: tokens of each.
        act_order: see :func:`mlx_qlayers.ops.gptq.gptq`.
        damping: likewise.
    """

    samples: int | None = None
    length: int = 512
    act_order: bool = False
    damping: float = 0.01


def quantize_model(
    model: nn.Module,
    tokenizer: Any,
    *,
    method: str = "gptq",
    group_size: int = 64,
    bits: int = 4,
    bits_per_weight: float | None = None,
    text: str | None = None,
    calibration: Calibration = Calibration(),
    folder: Path | None = None,
) -> dict[str, Any]:
    """Quantize the linear layers of a model in place, and round its embeddings.

    Args:
        model: one of mlx-lm's, unquantized; best loaded lazily.
        tokenizer: what came with it.
        method: ``"gptq"``, or ``"rtn"``, which rounds every weight to the nearest.
        group_size: weights that share a scale: 32, 64 or 128.
        bits: of a weight, 1 to 6 or 8.
        bits_per_weight: of the whole model, scales and all: each layer gets 2 to 8 bits by what
            they cost it. Embeddings keep ``bits``.
        text: what to calibrate with; by default the texts in ``models/data``.
        calibration: how much of it, and how.
        folder: where finished layers are kept, and looked up; by default nowhere.

    Returns:
        The ``quantization`` entry of ``config.json``.

    Raises:
        FileNotFoundError: no ``text`` was given and the repository's are not there.
        ValueError: an argument does not fit, the text is too short, or the model is of a kind whose
            layers cannot be run one by one.

    Example:
        >>> from mlx_lm import load
        >>> model, tokenizer = load("Qwen/Qwen2-0.5B-Instruct", lazy=True)
        >>> text, short = "Once upon a time " * 50, Calibration(samples=4, length=32)
        >>> quantize_model(model, tokenizer, bits=3, text=text, calibration=short)
        {'group_size': 64, 'bits': 3, 'mode': 'affine'}

    Source: Frantar et al., 2023, https://arxiv.org/abs/2210.17323.
    """
    default = Format.checked(group_size, bits)
    if method not in ("gptq", "rtn"):
        raise ValueError(f"method must be 'gptq' or 'rtn', not {method!r}")
    if bits_per_weight is not None and method == "rtn":
        raise ValueError("bits_per_weight needs method 'gptq', which measures what bits cost")
    formats = _formats(model, default)
    if method == "gptq":
        if bits_per_weight is not None:
            tables = {p for p, m in model.named_modules() if isinstance(m, nn.Embedding)}
            _least(model, formats.keys() - tables, formats, bits_per_weight)
        text = shipped_text("train") if text is None else text
        batches = _batches(tokenizer.encode(text), calibration)
        store = _Store(folder, [asdict(calibration), formats, bits_per_weight, text])
        if bits_per_weight is not None:
            losses = store.once("losses", lambda: _losses(model, batches, formats))
            formats |= mixture(model, losses, formats, bits_per_weight)
        _gptq(model, batches, formats, calibration, store)

    def rest(path: str, module: nn.Module) -> Any:
        return hasattr(module, "to_quantized") and path in formats and formats[path]._asdict()

    nn.quantize(model, class_predicate=rest)
    entries = {path: fmt._asdict() for path, fmt in formats.items() if fmt != default}
    return {**default._asdict(), **entries}


def shipped_text(part: str) -> str:
    """The repository's texts: for ``"train"`` the first nine tenths of each, else the last 5 %."""
    data = Path(__file__).parents[2] / "models" / "data"
    files = sorted(data.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{data}: the texts are not part of this installation; name a file")
    texts = [file.read_text(encoding="utf-8") for file in files]
    if part == "train":
        return "\n".join(text[: len(text) * 9 // 10] for text in texts)
    return "\n".join(text[len(text) * 19 // 20 :] for text in texts)


def windows(tokens: Sequence[int], count: int, length: int) -> mx.array:
    """Sequences (count, length) evenly spread over a text, or fewer if it has no more."""
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens, and a sequence is {length}")
    count = min(count, len(tokens) // length)
    step = (len(tokens) - length) // max(count - 1, 1)
    return mx.array([tokens[i * step : i * step + length] for i in range(count)])


def _batches(tokens: Sequence[int], calibration: Calibration) -> list[mx.array]:
    on_gpu = mx.default_device().type == mx.gpu
    samples = calibration.samples or (_SAMPLES if on_gpu else _SAMPLES_CPU)
    cut = windows(tokens, samples, calibration.length)
    size = math.gcd(_BATCH, len(cut))
    return [cut[i : i + size] for i in range(0, len(cut), size)]


def _formats(model: nn.Module, default: Format) -> dict[str, Format]:
    """The layers that are quantized, where the model has no other wish of its own."""
    wish: Callable[..., Any] = getattr(model, "quant_predicate", None) or (lambda *_: True)
    formats = {}
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") and (said := wish(path, module)):
            fmt = Format.from_entry(said) if isinstance(said, Mapping) else default
            if module["weight"].shape[-1] % fmt.group_size == 0:
                formats[path] = fmt
    if not formats:
        raise ValueError(f"no layer has a width that is a multiple of {default.group_size}")
    return formats


def _gptq(
    model: nn.Module,
    batches: Sequence[mx.array],
    formats: Mapping[str, Format],
    calibration: Calibration,
    store: _Store,
) -> None:
    from tqdm import tqdm

    done: dict[str, dict[str, mx.array]] = {}
    total = len(layers_of(model))
    for stage in tqdm(stages(model, batches), "GPTQ", total, unit="layer", disable=None):
        modules = {path: m for path, m in stage.modules.items() if path in formats}
        arrays = store.load(stage.number)
        if arrays is None:
            hessians, arrays = stage.hessians(), {}
            for path, module in modules.items():
                if path in hessians:  # else nothing in the text has reached it
                    found = gptq(
                        *(module["weight"], hessians[path], formats[path]),
                        act_order=calibration.act_order,
                        damping=calibration.damping,
                    )
                    mx.eval(found)
                    arrays |= {f"{path}.{name}": a for name, a in zip(_ARRAYS, found, strict=True)}
            store.save(stage.number, arrays)
        for path, module in modules.items():
            names = {name: f"{path}.{name}" for name in _ARRAYS}
            if packed := {name: arrays[key] for name, key in names.items() if key in arrays}:
                # The next layers see the rounded weights, in the form that is fast for many rows.
                weight, scales, biases = packed.values()
                module.weight = mx.dequantize(weight, scales, biases, *formats[path][:2])
                done[path] = packed
    modules = dict(model.named_modules())
    for path, fmt in formats.items():  # embeddings, and what nothing in the text has reached
        if path not in done:
            done[path] = dict(zip(_ARRAYS, nearest(modules[path]["weight"], fmt), strict=True))
    for path, packed in done.items():
        module = modules[path]
        layer = module.to_quantized(**formats[path]._asdict())
        layer.update(packed)
        model.update_modules(tree_unflatten([(path, layer)]))


def _losses(
    model: nn.Module, batches: Sequence[mx.array], formats: Mapping[str, Format]
) -> dict[str, dict[str, float]]:
    """The error of each layer's output, as a share of it, by the number of bits."""
    from tqdm import tqdm

    losses: dict[str, dict[str, float]] = {}
    total = len(layers_of(model))
    for stage in tqdm(stages(model, batches), "measuring", total, unit="layer", disable=None):
        for path, hessian in stage.hessians().items():
            if path not in formats:
                continue
            w, size = stage.modules[path]["weight"], formats[path].group_size
            whole = _weighed(w.astype(mx.float32), hessian)
            losses[path] = {}
            for bits in _WIDTHS:
                packed, scales, biases = mx.quantize(w, size, bits)
                rounded = mx.dequantize(packed, scales, biases, size, bits)
                wrong = _weighed((rounded - w).astype(mx.float32), hessian)
                losses[path][str(bits)] = wrong / max(whole, 1e-30)
    return losses


def _weighed(w: mx.array, hessian: mx.array) -> float:
    total: Any = ((w @ hessian) * w).sum().item()
    return float(total)


def mixture(
    model: nn.Module,
    losses: Mapping[str, Mapping[str, float]],
    formats: Mapping[str, Format],
    target: float,
) -> dict[str, Format]:
    """The bits of each layer: the largest gain for its size first, up to ``target`` bits a weight.

    ``losses`` has those of each layer by bits; layers without losses keep their formats.
    """
    sizes, used, total = _least(model, losses.keys(), formats, target)
    chosen = allocated(losses, sizes, target * total - used)
    return {p: Format(formats[p].group_size, bits) for p, bits in chosen.items()}


def allocated(
    losses: Mapping[str, Mapping[str, float]], sizes: Mapping[str, float], room: float
) -> dict[str, int]:
    """The bits of each path: the largest gain for its size first, up to ``room`` bits in all.

    ``losses`` has those of each by bits, the fewest of which it gets at least.
    """
    widths = [*map(int, next(iter(losses.values()), ()))]
    chosen = dict.fromkeys(losses, 0)
    while True:
        best = max(
            (
                ((losses[p][str(widths[i])] - losses[p][str(widths[i + 1])]) / cost, p, cost)
                for p, i in chosen.items()
                if i + 1 < len(widths) and (cost := sizes[p] * (widths[i + 1] - widths[i])) <= room
            ),
            default=None,
        )
        if best is None:
            return {p: widths[i] for p, i in chosen.items()}
        _, path, cost = best
        chosen[path] += 1
        room -= cost


def _least(
    model: nn.Module, measured: Collection[str], formats: Mapping[str, Format], target: float
) -> tuple[dict[str, int], float, int]:
    """Sizes of the layers, bits where those measured get fewest, and numbers of the model."""
    sizes = {
        path: module["weight"].size for path, module in model.named_modules() if path in formats
    }
    arrays: Any = tree_flatten(model.parameters())
    total = sum(a.size for _, a in arrays)
    used = 16.0 * (total - sum(sizes.values()))
    for path, size in sizes.items():
        scale_bits = 32 / formats[path].group_size  # scale and bias have 16 each
        used += size * ((_WIDTHS[0] if path in measured else formats[path].bits) + scale_bits)
    if not used <= target * total:
        raise ValueError(f"{target} bits per weight are too few: 2 a layer take {used / total:.2f}")
    return sizes, used, total


class _Store:
    """Finished layers, kept in a folder or nowhere; those made with other arguments are ignored."""

    def __init__(self, folder: Path | None, settings: object) -> None:
        self.folder = folder
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        wanted, file = json.dumps(settings, default=str), folder / "settings.json"
        if not file.is_file() or file.read_bytes() != wanted.encode():
            for old in folder.iterdir():
                old.unlink()
            replace_file(file, wanted)

    def load(self, number: int) -> dict[str, mx.array] | None:
        if self.folder is None or not (file := self._file(number)).is_file():
            return None
        with suppress(ValueError):  # one that a crash of the machine has cut short
            read_header(file)
            found: Any = mx.load(str(file))
            return dict(found)
        return None

    def save(self, number: int, arrays: dict[str, mx.array]) -> None:
        if self.folder is not None:
            part = self._file(number).with_suffix(".part.safetensors")
            mx.save_safetensors(str(part), arrays)
            part.replace(self._file(number))

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """A JSON value that is computed unless it is there."""
        if self.folder is None:
            return compute()
        file = self.folder / f"{name}.json"
        with suppress(ValueError, FileNotFoundError):
            return read_json(file)
        replace_file(file, json.dumps(computed := compute()))
        return computed

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer-{number:04}.safetensors"
