"""Operations take the arguments of MLX's operators, and what they declare: nothing else."""

import ast
import inspect
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_qlayers import attention, quantized_matmul, use_backend
from mlx_qlayers.ops.gather_qmm import gather_qmm
from tests.examples.declared import DECLARED
from tests.examples.invalid import OPERATIONS
from tests.numerics import assert_same_sums

OURS = {
    mx.quantized_matmul: quantized_matmul,
    mx.gather_qmm: gather_qmm,
    mx.fast.scaled_dot_product_attention: attention,
}
# Where an operator runs, and whether it must not be composed of others: ours have use_backend.
NOT_TAKEN = {"stream", "force_fused"}


@pytest.mark.parametrize("stock", OURS, ids=lambda function: function.__name__)
def test_the_same_arguments(stock):
    definition = ast.parse(f"def {stock.__doc__.splitlines()[0]}: ...").body[0].args
    positional = [a.arg for a in (*definition.posonlyargs, *definition.args)]
    ours = inspect.signature(OURS[stock]).parameters
    taken = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert taken == positional
    assert {a.arg for a in definition.kwonlyargs} - NOT_TAKEN <= set(ours)
    for name, default in zip(positional[::-1], definition.defaults[::-1], strict=False):
        assert ours[name].default == ast.literal_eval(default)


@pytest.mark.parametrize("transpose", [True, False])
def test_quantized_matmul_by_position(transpose):
    x, packed = mx.random.normal((3, 64)), mx.quantize(mx.random.normal((64, 64)), 32, 8)
    given = x, *packed, transpose, 32, 8, "affine"
    assert_same_sums(quantized_matmul(*given), mx.quantized_matmul(*given))


def test_gather_qmm_by_position():
    x, packed = mx.random.normal((6, 1, 64)), mx.quantize(mx.random.normal((4, 64, 64)), 32, 8)
    rows, matrices = mx.array([0, 5, 5]), mx.array([3, 1, 0])
    given = x, *packed, rows, matrices, False, 32, 8, "affine", None
    assert_same_sums(gather_qmm(*given), mx.gather_qmm(*given))


def test_attention_by_position():
    rng = np.random.default_rng(0)
    q, k, v = (mx.array(rng.normal(size=(1, 2, n, 32)), mx.float32) for n in (3, 5, 5))
    options = {"scale": 0.2, "mask": "causal", "sinks": mx.ones(2)}
    stock = mx.fast.scaled_dot_product_attention(q, k, v, **options)
    assert_same_sums(attention(q, k, v, **options), stock)


@pytest.mark.parametrize("each", DECLARED, ids=lambda each: each.function.__name__)
def test_what_is_declared_is_taken_and_nothing_else(each):
    rng, refused = np.random.default_rng(7), 0
    for _ in range(5):
        values = each.drawn(rng)
        for argument in each.signature.arguments:
            for other in damaged(values[argument.name], argument):
                given = values | {argument.name: other}
                why = each.refused(given)
                with use_backend("reference"):
                    if why is None:
                        mx.eval(each(**given))
                        continue
                    with pytest.raises(ValueError) as caught:
                        mx.eval(each(**given))
                assert str(caught.value) == why or other == "text"
                assert why.split()[0] in values and " must " in why and ", " in why
                refused += 1
    assert refused > 5


def damaged(value, argument):
    """The value, and others in its place."""
    yield value
    if not isinstance(value, mx.array):
        yield from (-1, "x", float("nan")) if value is not None else ()
        return
    yield from (value.astype(mx.complex64), value[None], "text")
    leading = max((shape[0] == "..." for shape in argument.shapes if shape), default=False)
    for axis in range(value.ndim - 2 if leading else 0, value.ndim):  # those may not broadcast
        yield mx.concatenate([value, value[(slice(None),) * axis + (slice(0, 1),)]], axis)


# The kinds that signatures name, as documentation does.
KINDS = {"float": "float32, float16 or bfloat16|floating point|dtype of|or packed|numbers"}
KINDS |= {"bool": "booleans", "integer": "integers|int32", "any": ""}


def documented(function):
    """The documentation of each argument."""
    text = inspect.getdoc(function).split("\nArgs:\n")[1].partition("\n\n")[0]
    parts = re.split(r"^    (\w[\w, ]*): ", text, flags=re.M)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: " ".join(said.split()) for names, said in pairs for name in names.split(", ")}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_is_documented(name):
    function = OPERATIONS[name].function
    assert [*documented(function)] == [*inspect.signature(function).parameters]


def ranks(shapes):
    """How many axes shapes have, and whether there are others in front of them."""
    tokens = [shape.strip(", ").split(", ") if shape else [] for shape in shapes]
    return {(len([t for t in s if t[0] not in ".*"]), any(t[0] in ".*" for t in s)) for s in tokens}


@pytest.mark.parametrize("each", DECLARED, ids=lambda each: each.function.__name__)
def test_declared_shapes_and_dtypes_are_documented(each):
    said = documented(each.function)
    for argument in each.signature.arguments:
        if not argument.is_array:
            continue
        text = said[argument.name]
        shapes = re.findall(r"\(((?:[^()]|\([^()]*\))*)\)", text.replace("0-d", "()"))
        declared = [", ".join(shape) for shape in argument.shapes]
        assert ranks(declared) <= ranks(shapes) or "the same" in text, (argument.name, text)
        pattern = "|".join(KINDS.get(kind, kind) for kind in argument.kind.split("|"))
        assert re.search(pattern, text) or argument.kind in said or "the same" in text, text
