"""The graph of a step, as it is printed."""

import step_graphs
from readme import filled

from mlx_qlayers.cli import main

MODEL = step_graphs.SHIPPED


def test_a_layer_is_five_nodes(capsys):
    assert main(["explain", "--graph", str(MODEL), "--layer", "1"]) == 0
    captured, after = capsys.readouterr().out.strip().split("\n\n")
    assert captured.startswith("captured, ") and captured.count("QuantizedMatmul[64, 4, 0") == 7
    title, *nodes = after.splitlines()
    assert title.startswith("after the rules, ")
    ops = [node.partition(" = ")[2].partition("[")[0] for node in nodes]
    assert ops == ["Products", "AttentionStep", "Products", "Products", "Products"]
    assert "layers.1.mlp.gate_proj, -, model.layers.1.mlp.up_proj" in nodes[3]


def test_the_whole_model(capsys):
    assert main(["explain", "--graph", str(MODEL)]) == 0
    assert capsys.readouterr().out.count("= AttentionStep") > 1


def test_the_page_on_design_shows_what_the_command_prints():
    text = step_graphs.PAGE.read_text()
    assert filled(text, dict(step_graphs.parts())) == text, "run python tests/step_graphs.py"
    assert text.count("\ncaptured, ") == text.count("\nafter the rules, ") == 2
