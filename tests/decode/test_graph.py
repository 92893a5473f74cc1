"""Patterns and rules on graphs that are made by hand."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_qlayers.decode.graph import Graph, Node, P, Size, Spec, fits, resolved, rewrite
from mlx_qlayers.decode.primitives import call_of

SPEC = Spec((2, 3), mx.float32)
X, Y = (Node("Input", (), (name,), (SPEC,)) for name in "xy")


def made(op: str, *src: Node, arg: tuple[object, ...] = ()) -> Node:
    return Node(op, src, arg, (SPEC,))


def silu(x: Node, root: Node) -> Node:
    return root.like("Silu", x)


RULES = [(P("Multiply(x, Sigmoid(x))"), silu)]


def test_a_name_stands_for_one_node_and_operands_in_any_order() -> None:
    for root in (made("Multiply", X, made("Sigmoid", X)), made("Multiply", made("Sigmoid", X), X)):
        (out,) = rewrite(Graph({"y": root}), RULES).outputs.values()
        assert (out.op, out.src) == ("Silu", (X,))
    other = made("Multiply", X, made("Sigmoid", Y))
    assert rewrite(Graph({"y": other}), RULES).outputs["y"].op == "Multiply"


def test_what_is_equal_becomes_one_node_and_then_fits() -> None:
    twins = made("Exp", X), made("Exp", X)
    root = made("Multiply", twins[0], made("Sigmoid", twins[1]))
    (out,) = rewrite(Graph({"y": root}), RULES).outputs.values()
    assert out.op == "Silu" and out.src[0] is not None and out.src[0].op == "Exp"


def test_a_node_that_others_take_too() -> None:
    shared = made("Exp", X)
    once = [(P("Negative(+Exp(x))"), lambda x, root: root.like("Both", x))]
    alone = rewrite(Graph({"y": made("Negative", shared)}), once).outputs["y"]
    both = rewrite(Graph({"y": made("Negative", shared), "z": shared}), once).outputs["y"]
    assert (alone.op, both.op) == ("Both", "Negative")


def test_a_node_that_may_be_there() -> None:
    pattern = [(P("Exp(~Broadcast(Sin(x)))"), lambda x, root: root.like("E", x))]
    for inner in (made("Sin", X), made("Broadcast", made("Sin", X))):
        assert rewrite(Graph({"y": made("Exp", inner)}), pattern).outputs["y"].op == "E"


def test_sizes() -> None:
    size = Size(3, (("batch", 2), ("0.offset", 1)))
    assert resolved((size, 4, (size,)), {"batch": 5, "0.offset": 100}) == (113, 4, (113,))
    assert str(size) == "2 batch + 0.offset + 3"


def test_nodes_come_behind_what_they_take_however_deep() -> None:
    node = X
    for _ in range(5000):
        node = made("Exp", node)
    nodes = Graph({"y": node}).nodes()
    assert nodes[0] is X and nodes[-1] is node and len(nodes) == 5001


def test_patterns_are_texts() -> None:
    known = {"root": P("Sqrt[True](y @ (Sin | Cos)(x, ...)) | Exp[_, 2](x)")}
    pattern = P("Divide(_, root)", **known)
    for op, arg, src, names in (
        ("Sqrt", (True,), (made("Cos", X, Y),), {"x", "y"}),
        ("Sqrt", (False,), (made("Cos", X, Y),), None),
        ("Sqrt", (True,), (made("Tan", X, Y),), None),
        ("Exp", (7, 2), (X,), {"x"}),
        ("Exp", (7, 3), (X,), None),
        ("Exp", (7, 2), (X, Y), None),
    ):
        found = fits(pattern, made("Divide", Y, made(op, *src, arg=arg)))
        assert (found and {*found}) == names, (op, arg)
    with pytest.raises(ValueError, match="Lambda"):
        P("lambda: x")


def test_rows_that_are_padded_have_the_value() -> None:
    """Ahead and behind, by numbers that may depend on the batch size."""
    x, value = (Node("Input", (), (name,), (Spec((), mx.float32),)) for name in "xv")
    arg = (1,), (2,), (Size(0, (("batch", 1),)),)
    call = call_of(Node("Pad", (x, value), arg, (Spec((3, 9), mx.float32),)))
    y = call.function(mx.ones((3, 4)), mx.array(5.0), *call.more(resolved(arg, {"batch": 3})))
    assert y.shape == (3, 9) and y[0].tolist() == [5.0] * 2 + [1.0] * 4 + [5.0] * 3
