"""Print the graph of a model's step of decoding, before and after this package's rules."""

from __future__ import annotations

import argparse

from .arguments import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--graph")
    parser.add_argument("--layer", type=int, help="only the nodes of this decoder layer, from 0")


def run(args: argparse.Namespace) -> None:
    from ..conversion.loading import load_stock
    from ..decode.drawing import graphs, lines

    loaded = load_stock(args.graph, lazy=True, trust_remote_code=args.trust_remote_code)
    for title, graph in zip(("captured", "after the rules"), graphs(loaded.model), strict=True):
        print(f"{title}, {len(graph.nodes())} nodes")
        print(*lines(graph, args.layer), sep="\n", end="\n\n")
