"""Quantize a checkpoint into an mlx-lm directory, which appears whole or not at all."""

from __future__ import annotations

import argparse

from .arguments import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--hf-path")
    parser.add_argument("--mlx-path", required=True, metavar="PATH", help="the directory to write")
    parser.add_argument("--mode", default="affine", help="affine, mxfp4, nvfp4 or mxfp8")
    parser.add_argument("--group-size", type=int, help="weights to a scale; the mode's usual one")
    parser.add_argument("--bits", type=int, help="bits of a weight; the mode's usual number")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="of what is not quantized; the checkpoint's own",
    )


def run(args: argparse.Namespace) -> None:
    from ..conversion.quantize import quantize_checkpoint

    written = quantize_checkpoint(
        args.hf_path,
        args.mlx_path,
        group_size=args.group_size,
        bits=args.bits,
        mode=args.mode,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
    )
    print(written)
