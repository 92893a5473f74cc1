"""Scenarios of people on a Mac, in a process that has an Apple GPU of ``tests/apple_gpu.py``.

Each scenario prints a line of JSON for each result: what it was, and why it is not as stock's.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from multiprocessing import connection
from pathlib import Path
from typing import Any

import apple_gpu
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.models import qwen2
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from tensors import differs, other_tensors, tensors  # noqa: F401, scenarios

from mlx_qlayers import (
    convert_model,
    fused_loss,
    quantize_model,
    recompute_activations,
    use_backend,
)
from mlx_qlayers.commands.examples import examples, families
from mlx_qlayers.conversion.gptq import Calibration
from mlx_qlayers.decode import engine
from mlx_qlayers.dispatch import choice
from mlx_qlayers.runtime import proof, worker
from mlx_qlayers.runtime.backend import Mode, current

ARGS = qwen2.ModelArgs("qwen2", 128, 2, 192, 4, 1e-6, 96, 2, tie_word_embeddings=True)
TOKENS = 20
# Of units and registers that an M5 has: see tensors.py.
_OF_M5 = ("tensor_ops", "int8_matmul", "gated_delta")


def kernels_everywhere() -> None:
    """As if every kernel had been measured to be faster, in all threads, and graphs were made."""
    choice._refusal = ContextVar("refusal", default="")

    def where() -> Any:
        eager = current.get().mode is Mode.EAGER
        return ("metal", threading.get_ident()) if eager else None

    engine.where = where


def patience_begins_with_a_hang() -> None:
    """As if whatever does not hang were fast, on however busy a machine."""
    hangs = Path(os.environ[apple_gpu.HANGS])

    def wait(files: Any, seconds: float) -> list[Any]:
        while not (ready := connection.wait(files, 0.02)) and not hangs.exists():
            pass
        if not ready and not (ready := connection.wait(files, seconds)):
            hangs.unlink()
        return ready

    worker.wait = wait


def operations() -> Iterator[tuple[str, str]]:
    """The smallest call of each family by each of its kernels, with gradients."""
    for family in families():
        for check in () if family in _OF_M5 else examples(family):
            run, given = check.run, check.arrays
            yield check.name, differs(run(*given), run, given, check.terms, 4 * check.steps)


def _model() -> Any:
    mx.random.seed(0)
    model = qwen2.Model(ARGS)
    model.set_dtype(mx.float32)
    nn.quantize(model, group_size=64, bits=4)
    model.eval()
    mx.eval(model.parameters())
    return model


def _cache(kind: str) -> list[Any]:
    if kind == "rotating":
        return [RotatingKVCache(max_size=16, keep=4) for _ in range(2)]
    return [KVCache() for _ in range(2)]


def _tokens(model: Any, kind: str, batch: int) -> list[list[int]]:
    """Greedy tokens behind a prompt of seven."""
    cache, found = _cache(kind), []
    y = mx.random.randint(0, 96, (batch, 7), key=mx.random.key(batch))
    for _ in range(TOKENS):
        y = mx.argmax(model(y, cache=cache)[:, -1:], axis=-1)
        found.append(y.flatten().tolist())
        if kind == "quantized" and not hasattr(cache[0], "bits"):
            cache = [c.to_quantized(group_size=32, bits=8) for c in cache]
    return found


def decoding() -> Iterator[tuple[str, str]]:
    """Conversion, and twenty tokens."""
    stock, model = _model(), _model()
    convert_model(model)
    tried = "".join(f"{verdict.kernel} " for verdict in proof.stored().values())
    lacking = [name for name in ("qmv", "attention_decode") if name not in tried]
    yield "a conversion tries each kind of layer", f"not {lacking}" if lacking else ""
    for kind in ("plain", "rotating", "quantized"):
        for batch in (1, 8):
            with use_backend("reference"):
                expected = _tokens(stock, kind, batch)
            found = _tokens(model, kind, batch)
            differs = "" if found == expected else f"{found} is not {expected}"
            yield f"{TOKENS} tokens, {kind} cache, batch {batch}", differs


def _loss_of_lora(model: Any, ours: bool) -> float:
    mx.random.seed(1)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    model.train()
    tokens = mx.random.randint(0, 96, (2, 40), key=mx.random.key(3))
    if ours:  # as mlx-qlayers lora trains
        recompute_activations(model)
    step = nn.value_and_grad(model, fused_loss(model) if ours else default_loss)
    optimizer = optim.Adam(1e-2)
    for _ in range(2):
        (value, _), gradients = step(model, tokens, mx.array([[1, 39]] * 2))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), value)
    return float(value.item())


def training() -> Iterator[tuple[str, str]]:
    """Two steps of LoRA."""
    stock, model = _model(), _model()
    convert_model(model)
    with use_backend("reference"):
        expected = _loss_of_lora(stock, ours=False)
    found = _loss_of_lora(model, ours=True)
    yield "LoRA step", "" if abs(found - expected) <= 1e-3 * expected else f"{found}, {expected}"


def quantizing() -> Iterator[tuple[str, str]]:
    """The work of ``mlx-qlayers quantize``: by GPTQ."""

    class Words:
        def encode(self, text: str) -> list[int]:
            return [5 * i * i % 96 for i in range(64)]

    def weights() -> mx.array:
        mx.random.seed(2)
        model = qwen2.Model(ARGS)
        model.set_dtype(mx.float32)
        model.eval()
        quantize_model(model, Words(), text="", calibration=Calibration(2, 16))
        layer = model.layers[0].mlp.up_proj
        return mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 4)

    with use_backend("reference"):
        expected = weights()
    # A weight between two codes may get the other one.
    share = (mx.abs(weights() - expected).mean() / mx.abs(expected).mean()).item()
    yield "quantize", "" if share < 0.01 else f"{share:.1%} of the weights are others"


def serving() -> Iterator[tuple[str, str]]:
    """Requests side by side in a thread, as the server computes them."""
    from mlx_lm.generate import BatchGenerator

    def texts(model: Any) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        generator = BatchGenerator(model, max_tokens=6)
        names = generator.insert([[5, 17, 3], [60, 2, 9, 44, 7]])
        while responses := generator.next_generated():
            for response in responses:
                found.setdefault(response.uid, []).append(response.token)
        return [found[name] for name in names]

    stock, model = _model(), _model()
    convert_model(model)
    with use_backend("reference"):
        expected = texts(stock)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(texts(model)))
    thread.start()
    thread.join()
    yield "server", "" if results == [expected] else f"{results} is not {[expected]}"


def main(*names: str) -> None:
    kernels_everywhere()
    patience_begins_with_a_hang()
    for name in names:
        scenario: Callable[[], Iterator[tuple[str, str]]] = globals()[name]
        for result in scenario():
            print(json.dumps(result), flush=True)
    os._exit(0)  # a thread of mlx-lm's is still there


if __name__ == "__main__":
    main(*sys.argv[1:])
