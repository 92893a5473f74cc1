"""Models whose logits of a sequence are the same bits whatever else is in the batch.

Neighbours decide which kernel runs, and change attention, whose blocks of keys begin where a
batch's padding ends. Batch-invariant models take one kernel for all numbers of rows. On a CPU keys
are added up in the order of their tokens, one by one; on a GPU in tiles that are counted from the
first token, and stock layers, whose products choose by rows, are refused by name.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..decode.twin import is_stepped
from ..layers.qlinear import Counterpart
from ..runtime.devices import device_of

_PROMPTS = [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1, 4], [2, 7, 1, 8, 2]
_MORE = 90  # tokens in front of the first prompt on a GPU: several tiles of keys, blocks of rows
# The order of a window's keys by their identity: layers without a cache may attend to them as well.
_orders: dict[int, tuple[Any, mx.array | None]] = {}


def in_time(cache: Any, keys: Any, values: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Keys, values and mask in the order of tokens, where a window's rows go round."""
    rows, key = _arrays(keys)[0], id(_arrays(keys)[0])
    if cache is not None:
        order = _order(vars(cache), rows.shape[2])
        _orders[key] = ref(rows, lambda _: _orders.pop(key, None)), order
    if (order := _orders.get(key, (None, None))[1]) is None:
        return keys, values, mask
    keys, values = (tree_map(lambda x: mx.take(x, order, 2), each) for each in (keys, values))
    return keys, values, mx.take(mask, order, -1) if isinstance(mask, mx.array) else mask


def _order(own: dict[str, Any], rows: int) -> mx.array | None:
    """The rows of a full window in the order of tokens; None where they are in it."""
    at, keep = own.get("_idx"), own.get("keep", 0)
    if "max_size" not in own or at in (rows, None) or not own.get("rotated", True):
        return None
    # Rows of another cache, to which a layer may attend as well, do not go round with this one's.
    is_full = own.get("_offset", own.get("offset")) >= own["max_size"]
    if not is_full or own["keys"] is None or _arrays(own["keys"])[0].shape[2] != rows:
        return None
    return mx.array([*range(keep), *range(at, rows), *range(keep, at)])


def _arrays(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, mx.array) else tuple(x)


def starts_of(cache: Any, batch: int) -> mx.array:
    """Before which keys of a batch there is padding, for attention on a GPU: (B,) int32."""
    own = vars(cache) if cache is not None else {}
    if "max_size" in own:
        raise ValueError(
            "batch-invariant models on a GPU take no rotating caches, whose windows begin "
            "elsewhere after each token"
        )
    padding = own.get("left_padding")
    return mx.zeros((batch,), mx.int32) if padding is None else padding.astype(mx.int32)


def check_can_be(model: nn.Module, activations: str | None = None) -> None:
    """Raise a ``ValueError`` where nothing is batch-invariant, or the model was converted."""
    if is_stepped(model):
        raise ValueError("batch_invariant takes a model that was not converted: revert_model first")
    if activations is not None:
        raise ValueError(f"batch_invariant takes no activations={activations!r}: of prompts alone")
    if not device_of().kernels:
        raise ValueError("batch_invariant needs kernels: stock operators are chosen by rows")


def _check_layers(model: nn.Module) -> None:
    """Raise a ``ValueError`` for a layer that multiplies by other than this package's kernels."""
    for path, module in model.named_modules():
        own, weight = isinstance(module, Counterpart), module.get("weight")
        looked_up = isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
        if isinstance(weight, mx.array) and weight.ndim > 1 and not own and not looked_up:
            raise ValueError(
                f"batch_invariant takes no {type(module).__name__} on a GPU, where its product is "
                f"another for other numbers of rows: {path}"
            )


def check_model(model: nn.Module) -> None:
    """Compare logits alone, in a batch, in chunks and of several tokens, bit by bit.

    A ``ValueError`` says that something in the model depends on what else is computed with it.
    """
    from mlx_lm.models.cache import make_prompt_cache

    run: Any = model
    alone, caches, prompts = [], [], [*_PROMPTS]
    if device_of().gpu:
        _check_layers(model)
        prompts[0] = [each % 10 for each in range(_MORE)] + prompts[0]
    for prompt in prompts:
        cache = make_prompt_cache(model)
        alone.append(run(mx.array([prompt]), cache=cache)[0])
        cache = make_prompt_cache(model)
        parts = [run(mx.array([prompt[:1]]), cache=cache)]
        if len(prompt) > 3:
            parts.append(run(mx.array([prompt[1:-2]]), cache=cache))
        _compare(alone[-1][: len(prompt) - 2], mx.concatenate(parts, 1)[0], "a prompt in chunks")
        caches.append(cache)
    if not all(hasattr(c, "merge") for c in caches[0]):
        return
    batch = [some[0].merge([*some]) for some in zip(*caches, strict=True)]
    for i in (-2, -1):
        tokens = mx.array([[prompt[i]] for prompt in prompts])
        try:
            found = run(tokens, cache=batch)
        except ValueError as error:  # mlx-lm's own code of some models
            raise ValueError(f"the model is not batch-invariant: a batch fails: {error}") from error
        for each, own in zip(found, alone, strict=True):
            _compare(own[i], each[0], "a batch")


def _compare(one: mx.array, other: mx.array, what: str) -> None:
    if not mx.array_equal(one, other).item():
        differs = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max().item()
        raise ValueError(f"the model is not batch-invariant: {what} differs by {differs:.2g}")
