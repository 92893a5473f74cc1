"""Products in 8-bit integers: layouts of tensors, mixed columns, layers and models."""

from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_qlayers import QLinear, convert_model, explain, revert_model, use_backend
from mlx_qlayers.layers.int8_linear import Int8Linear
from mlx_qlayers.metal.int8.launch import int8_rows
from mlx_qlayers.ops.int8_matmul import int8_matmul
from mlx_qlayers.reference.int8_matmul import rotated
from mlx_qlayers.runtime.host import checks
from mlx_qlayers.runtime.host.compiled_kernel import LAYOUTS
from mlx_qlayers.runtime.spec import Spec
from tests.examples import RANDOM
from tests.gpus import GPUS
from tests.numerics import EPSILON, ROUNDINGS, assert_accurate, random, to64

HALVES = (mx.float16, mx.bfloat16)


def logits_of(model: nn.Module, length: int) -> np.ndarray:
    return to64(model(mx.arange(length)[None] % 90))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_sums_in_every_layout_of_tensors(layout):
    """The largest tile, with edges."""
    call = RANDOM["int8_matmul"].call("host", rows=(130,), n=150, k=272, dtype="bfloat16")

    def function(**given):
        with checks(tensor_layout=layout):
            y = int8_matmul(**given)
            mx.eval(y)
        return y

    call._replace(function=function).check("host")


def _mixed(x, block):
    """In float64, what is rounded."""
    x = to64(x)
    for _ in range(block.bit_length() - 1):  # a perfect shuffle of columns, and a butterfly
        halves = x.reshape(len(x), -1, block // 2, 2)
        both = halves[..., 0] + halves[..., 1], halves[..., 0] - halves[..., 1]
        x = np.concatenate(both, axis=-1).reshape(x.shape)
    return x / 8 if block else x


@pytest.mark.parametrize("path", ["host", *GPUS])
@pytest.mark.parametrize(("k", "block"), [(272, 16), (640, 128), (96, 32), (1408, 64), (48, 0)])
def test_columns_are_mixed_in_the_launch_that_rounds(k, block, path):
    """No code is further from the mixed column than half of one."""
    rng = np.random.default_rng(k)
    x = random(rng, (3, k), HALVES[block % 3 - 1], 3.0)
    with use_backend(path), checks() if path == "host" else nullcontext():
        codes, scales = int8_rows(Spec.of(x), block)(x)
        mx.eval(codes, scales)
    truth, unit = _mixed(x, block), to64(scales)[:, None]
    assert (np.abs(to64(codes)).max(1) == 127).all()
    off = np.abs(to64(codes) * unit - truth) - 0.5 * unit
    assert off.max() <= ROUNDINGS[mx.float32] * EPSILON[mx.float32] * np.abs(truth).max()


def test_gradients_of_mixed_columns():
    """Those of the same without rounding to 8 bits."""
    rng = np.random.default_rng(7)
    w = mx.array(rng.integers(-127, 128, (24, 64)), mx.int8)
    scales = mx.array(rng.uniform(0.01, 0.02, 24), mx.float32)
    x = random(rng, (5, 64), mx.bfloat16)

    def unrounded(x):
        return (rotated(x, 64) @ (w * scales[:, None]).astype(x.dtype).T).sum()

    def rounded(x):
        return int8_matmul(x, w, scales, block=64).sum()

    truth, base = mx.grad(unrounded)(x.astype(mx.float32)), mx.grad(unrounded)(x)
    for path in ("host", "reference"):
        with use_backend(path):
            assert_accurate(mx.grad(rounded)(x), to64(truth), base)


def test_a_layer_and_back():
    layer = QLinear(96, 40, bias=True, group_size=32)
    layer.eval()
    layer.set_dtype(mx.bfloat16)
    names, x = sorted(layer.parameters()), mx.random.normal((129, 96)).astype(mx.bfloat16)
    few, many = layer(x[:128]), layer(x)
    joined = Int8Linear.joining(layer)
    assert joined is layer and sorted(layer.parameters()) == names
    assert mx.array_equal(layer(x[:128]), few)
    rounded = layer(x)
    assert not mx.array_equal(rounded, many)
    # A row and the matrix lose half of 1/127 of their largest each, in sums of 96 random terms.
    assert np.abs(to64(rounded) - to64(many)).max() < np.abs(to64(many)).max() / 32
    layer.train()
    assert mx.array_equal(layer(x), many)
    layer.eval()
    layer.bias = layer.bias.astype(mx.float32)
    assert layer(x).dtype == mx.float32
    layer.leave()
    assert type(layer) is QLinear and "_int8" not in layer


def test_columns_that_are_large_do_not_take_the_digits_of_others():
    """Mixed with 127 others, such a column leaves at most half of the error."""
    rng = np.random.default_rng(3)
    layer = QLinear(256, 64, bias=False)
    layer.eval()
    layer.set_dtype(mx.bfloat16)
    x = rng.normal(size=(129, 256)).astype(np.float32)
    x[:, 5] *= 300
    x = mx.array(x).astype(mx.bfloat16)
    dense = mx.dequantize(layer.weight, layer.scales, layer.biases).astype(mx.float32)
    truth = to64(x) @ to64(dense).T
    scales = mx.abs(dense).max(axis=1) / 127
    plain = int8_matmul(x, mx.round(dense / scales[:, None]).astype(mx.int8), scales)
    mixed = Int8Linear.joining(layer)(x)
    lost = [np.sqrt(((to64(y) - truth) ** 2).mean()) for y in (plain, mixed)]
    assert lost[1] < lost[0] / 2


def test_prompts_of_a_model(tiny_model):
    from mlx_lm import load

    model, _ = load(str(tiny_model))
    model.set_dtype(mx.bfloat16)
    before = logits_of(model, 130)
    with use_backend("reference"):
        convert_model(model, activations="int8", calibrate=False)
        layers = [m for m in model.modules() if isinstance(m, Int8Linear)]
        assert len(layers) == 7 * len(model.layers)
        few = logits_of(model, 3)
        explain(reset=True)
        found = logits_of(model, 130)
    calls = {decision.op: decision.calls for decision in explain()}
    assert calls["int8_matmul"] == len(layers)
    with use_backend("reference"):
        np.testing.assert_array_equal(logits_of(model, 3), few)
    assert not np.array_equal(found, before)
    assert np.abs(found - before).max() < np.abs(before).max() / 8
    revert_model(model)
    assert not any(isinstance(m, QLinear) for m in model.modules())
    assert all(type(m) is not Int8Linear for m in model.modules())
    np.testing.assert_array_equal(logits_of(model, 130), before)


def test_tokens_of_a_model_on_a_cpu(tiny_model):
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    model, _ = load(str(tiny_model))
    model.set_dtype(mx.bfloat16)

    def of_tokens() -> tuple[np.ndarray, np.ndarray]:
        cache = make_prompt_cache(model)
        prompt = to64(model(mx.arange(20)[None], cache=cache))
        steps = [to64(model(mx.array([[i]]), cache=cache)) for i in range(5)]
        return prompt, np.concatenate(steps, axis=1)

    with use_backend("host"):
        convert_model(model, calibrate=False)
        before = of_tokens()
        revert_model(model)
        convert_model(model, activations="int8", calibrate=False)
        found = of_tokens()
        np.testing.assert_array_equal(found[0], before[0])  # more than 8 rows
        assert 0 < np.abs(found[1] - before[1]).max() < np.abs(before[1]).max() / 20
        revert_model(model)
        convert_model(model, calibrate=False)
        np.testing.assert_array_equal(of_tokens()[1], before[1])


def test_activations_of_another_name():
    with pytest.raises(ValueError, match="activations must be 'int8'"):
        convert_model(nn.Linear(8, 8), activations="int4")
