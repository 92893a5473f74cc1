"""A model that decodes by graphs: what it computes, what is done to it, what the report says."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as nn
from architectures import VOCABULARY, build
from converted import PLAIN, TOKENS, add_adapters, decoded, fusions, pair
from mlx_lm.models.cache import make_prompt_cache
from numerics import assert_same_model, assert_same_states

from mlx_qlayers import convert_model, explain, revert_model
from mlx_qlayers.conversion.report import FUSED, LEFT
from mlx_qlayers.decode.twin import is_stepped


def test_many_rows_run_the_code_as_it_was():
    stock, model = pair()
    tokens = mx.random.randint(0, VOCABULARY, (1, 17))
    explain(reset=True)
    assert_same_model(model(tokens), stock(tokens), bits=None, what="17 rows")
    assert "fused_products" not in {d.op for d in explain()}


def test_adapters():
    stock, model = pair()
    for m in (stock, model):
        add_adapters(m, 1)
        m.eval()
    explain(reset=True)
    assert_same_model(decoded(model), decoded(stock), bits=None, what="with adapters")
    assert sum(d.calls for d in explain() if d.op == "fused_products")
    assert fusions(convert_model(model))[""][0] == "already converted"


def test_gradient_of_the_embeddings():
    stock, model = pair()
    x = mx.random.normal((1, 3, 128), key=mx.random.key(0))

    def loss(m):
        return lambda x: (m(TOKENS[:, :3], input_embeddings=x) ** 2).mean()

    expected = mx.grad(loss(stock))(x)
    for function in (loss(model), mx.checkpoint(loss(model)), mx.compile(loss(model))):
        found = mx.grad(function)(x)
        assert_same_states(found, expected, bits=None, what="gradient")


def test_gradient_of_the_embeddings_on_a_gpu(gpu_path):
    """The second time the parts have been traced, without what carries gradients."""
    test_gradient_of_the_embeddings()
    decoded(pair()[1])
    test_gradient_of_the_embeddings()


def test_copies_and_pickles():
    _, model = pair()
    expected = decoded(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert mx.array_equal(decoded(twin), expected)
        twin.layers[0].input_layernorm.weight = twin.layers[0].input_layernorm.weight * 2
        assert not mx.array_equal(decoded(twin), expected)
    assert mx.array_equal(decoded(model), expected)


def test_without_patched_attention():
    stock, model = build("qwen2", PLAIN), build("qwen2", PLAIN)
    report = convert_model(model, attention=False)
    assert fusions(report)[""][0] == FUSED
    assert_same_model(decoded(model), decoded(stock), bits=None, what="stock attention")
    assert revert_model(model).counts == {"reverted": 18}
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_switch_and_predicate():
    model = build("qwen2", PLAIN)
    report = convert_model(model, fuse=False)
    assert report.fusions == () and not is_stepped(model)
    found = fusions(convert_model(model, predicate=lambda path, m: path != ""))
    assert found == {"": (LEFT, "the predicate says so")} and not is_stepped(model)
    report = convert_model(model)
    assert set(report.counts) == {"already converted"}
    assert [row.action for row in report.fusions] == [FUSED] and is_stepped(model)
    assert convert_model(nn.Sequential(nn.QuantizedLinear(64, 64))).fusions == ()


def test_more_than_tokens_and_a_cache_goes_to_the_model():
    """Another keyword, or no cache, or one that holds nothing."""
    stock, model = pair()
    x = mx.random.normal((1, 1, 128), key=mx.random.key(0))
    found = []
    for m in (stock, model):
        cache = make_prompt_cache(m)
        parts = [m(TOKENS[:, :1], cache=cache), m(TOKENS[:, :1], cache=cache)]
        parts += [m(TOKENS[:, :1], cache=cache, input_embeddings=x), m(TOKENS[:, :1], cache)]
        parts += [m(inputs=TOKENS[:, :1], cache=cache), m(TOKENS[:, :1])]
        found.append(mx.concatenate(parts, axis=1))
        assert cache[0].offset == 5
    assert_same_model(*reversed(found), bits=None, what="keywords")
