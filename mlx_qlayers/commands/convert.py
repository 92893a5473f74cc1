"""Quantize a checkpoint, or undo that: an mlx-lm directory, which appears whole or not at all."""

from __future__ import annotations

import argparse

from .arguments import add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--hf-path", required=False)
    option = parser.add_argument
    option("--gguf", metavar="FILE", help="a GGUF file in place of --hf-path; its codes are kept")
    option(
        *("-d", "--dequantize"),
        action="store_true",
        help="write a quantized checkpoint without its quantization",
    )
    option("--mlx-path", required=True, metavar="PATH", help="the directory to write")
    option("--mode", "--q-mode", default="affine", help="of mx.quantize, as mxfp4")
    option("--group-size", "--q-group-size", type=int, help="weights to a scale; the mode's own")
    option("--bits", "--q-bits", type=int, help="bits of a weight; the mode's usual number")
    option(
        "--quant-predicate",
        choices=("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"),
        help="mix two numbers of bits: the head and some layers get the larger",
    )
    option(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="of what is not quantized; the checkpoint's own",
    )
    option("--revision", help="a branch, tag or commit of the repository")
    option("--upload-repo", metavar="OWNER/NAME", help="upload the result to the Hugging Face Hub")


def run(args: argparse.Namespace) -> None:
    from ..conversion.quantize import convert_gguf, dequantize_checkpoint, quantize_checkpoint

    if (args.hf_path is None) == (args.gguf is None):
        raise ValueError("convert takes either --hf-path or --gguf")
    chosen = {"group_size": args.group_size, "bits": args.bits, "recipe": args.quant_predicate}
    quantizes = any(value is not None for value in chosen.values()) or args.mode != "affine"
    common = {name: getattr(args, name) for name in ("dtype", "revision", "trust_remote_code")}
    if args.gguf is not None:
        if quantizes or args.revision is not None or args.dequantize:
            raise ValueError("--gguf keeps the file's quantization: no option can change it")
        written = convert_gguf(args.gguf, args.mlx_path, dtype=args.dtype)
    elif args.dequantize:
        if quantizes:
            raise ValueError("--dequantize takes no option of a quantization")
        written = dequantize_checkpoint(args.hf_path, args.mlx_path, **common)
    else:
        written = quantize_checkpoint(
            args.hf_path, args.mlx_path, mode=args.mode, **chosen, **common
        )
    print(written)
    if args.upload_repo is not None:
        from mlx_lm.utils import upload_to_hub

        upload_to_hub(args.mlx_path, args.upload_repo)
