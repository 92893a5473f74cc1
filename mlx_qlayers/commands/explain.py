"""Print the graph of a model's step of decoding, before and after this package's rules."""

from __future__ import annotations

import argparse
import textwrap

from .arguments import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--graph")
    parser.add_argument("--layer", type=int, help="only the nodes of this decoder layer, from 0")
    text = "without arguments and shapes, and before the rules operations alone"
    parser.add_argument("--brief", action="store_true", help=text)


def run(args: argparse.Namespace) -> None:
    from ..conversion.loading import load_stock
    from ..decode.drawing import graphs, lines, operations

    loaded = load_stock(args.graph, lazy=True, trust_remote_code=args.trust_remote_code)
    before, after = graphs(loaded.model)
    for title, graph in ("captured", before), ("after the rules", after):
        shown = [*lines(graph, args.layer, args.brief)]
        count = len(shown) if args.brief else len(graph.nodes)
        if args.brief and graph is before:
            shown = textwrap.wrap(operations(graph, args.layer), 118, break_on_hyphens=False)
        print(f"{title}, {count} nodes", *shown, sep="\n", end="\n\n")
