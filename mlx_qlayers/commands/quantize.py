"""Quantize a checkpoint by calibration on a text (GPTQ), resumably, into an mlx-lm directory."""

from __future__ import annotations

import argparse

from .arguments import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model")
    option = parser.add_argument
    option("--mlx-path", required=True, metavar="PATH", help="the directory to write")
    option("--method", choices=("gptq", "rtn"), default="gptq", help="rtn rounds to the nearest")
    option("--bits", type=int, default=4, help="bits of a weight")
    option("--group-size", type=int, default=64, help="weights to a scale")
    option("--bits-per-weight", type=float, help="of the whole model: bits by sensitivity instead")
    option("--text", metavar="FILE", help="to calibrate with; the repository's texts")
    option("--samples", type=int, help="sequences of it; 128, on a CPU 24")
    option("--sequence-length", type=int, default=512, help="tokens of each")
    option("--act-order", action="store_true", help="columns with the largest inputs first")
    option("--damping", type=float, default=0.01, help="share of the mean diagonal of a Hessian")


def run(args: argparse.Namespace) -> None:
    from ..conversion.gptq import Calibration
    from ..conversion.quantize import quantize_calibrated
    from ..formats import Format

    Format.checked(args.group_size, args.bits)
    if args.bits_per_weight is not None and args.method == "rtn":
        raise ValueError("--bits-per-weight needs --method gptq, which measures what bits cost")
    calibration = Calibration(args.samples, args.sequence_length, args.act_order, args.damping)
    written = quantize_calibrated(
        args.model,
        args.mlx_path,
        method=args.method,
        group_size=args.group_size,
        bits=args.bits,
        bits_per_weight=args.bits_per_weight,
        text=args.text,
        calibration=calibration,
        trust_remote_code=args.trust_remote_code,
    )
    print(written)
