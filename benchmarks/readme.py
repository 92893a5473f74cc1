"""Writes measured numbers into README.md and docs/, from the files in ``benchmarks/results``.

    python benchmarks/readme.py

Each part stands between ``<!-- NAME -->`` and ``<!-- end -->``: tables, pictures and the sentences
that have numbers in them. This file says which rows a table has; every number comes from a file,
and stands beside the commit that was measured. Where kernels have changed since, that is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from os.path import relpath
from pathlib import Path

from common import cell, markdown, significant
from plot import PICTURES
from stored import RESULTS, ROOT, Results, Row

README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
TESTING = ROOT / "docs" / "testing-without-a-mac.md"
MODELS = ROOT / "docs" / "models.md"
SERVING = ROOT / "docs" / "serving.md"


@dataclass(frozen=True)
class Table:
    """The comparisons of one file."""

    stem: str  # the file's name without its ending
    command: str  # what measures it: the benchmark's file and its options
    # Of the first three columns; the fourth is the ratio. The first is the unit.
    heads: tuple[str, str, str]
    # How rows are called, by their columns; and, with `by`, where the number is.
    labels: Mapping[str, str]
    keep: str = ".+"  # a pattern of the labels that are shown
    # The columns of both numbers; or, with `by`, two values of that column.
    sides: tuple[str, str] = ("stock", "kernel")
    by: str = ""
    where: Mapping[str, str] = field(default_factory=dict)  # what rows must have, by column
    scale: float = 1.0  # the file's unit in that of the table

    def cells(self) -> dict[str, tuple[str, str, str]]:
        """Both numbers and the ratio, by label; rows that lack one are left out."""
        rate = self.heads[0].startswith("tokens")
        cells = {}
        for label, numbers in self._numbers().items():
            if re.fullmatch(self.keep, label) and len(numbers) == 2:
                a, b = (self.scale * numbers[side] for side in self.sides)
                ratio = significant(b / a if rate else a / b)
                cells[label] = (significant(a), significant(b), f"{ratio}x")
        return cells

    def _numbers(self) -> dict[str, dict[str, float]]:
        """The first number of each side, by label."""
        results = read(self.stem)
        numbers: dict[str, dict[str, float]] = {}
        for row in results.rows if results else ():
            if any(row.get(key) != value for key, value in self.where.items()):
                continue
            for (label, value), side in product(self.labels.items(), self.sides):
                number = row.get(value if self.by else side)
                if number and (not self.by or row.get(self.by) == side):
                    numbers.setdefault(_label(label, row), {}).setdefault(side, number)
        return numbers

    def __str__(self) -> str:
        results, cells = read(self.stem), self.cells()
        shell = f"`python benchmarks/bench_{self.command}`"
        if not results or not cells:
            return f"Not measured yet: {shell} prints this table."
        day, mlx = results.facts["date"].split()[0], results.facts["mlx"]
        source = _link("file", _path(self.stem), BENCHMARKS)
        rows = ((task, *numbers) for task, numbers in cells.items())
        table = markdown((*self.heads, "ratio"), rows)
        caption = f"{results.device}, MLX {mlx}, {day}, {_commit(results)}, {shell}, {source}:"
        return f"{caption}\n\n{table}"


def _path(stem: str) -> Path:
    return RESULTS / f"{stem}.csv"


def _commit(results: Results) -> str:
    changed = " (kernels have changed since)" if results.stale else ""
    return f"commit {results.commit}{changed}"


@cache
def read(stem: str) -> Results | None:
    """The result of a benchmark, if there is one."""
    return Results.read(_path(stem)) if _path(stem).exists() else None


def _link(text: str, path: Path, page: Path) -> str:
    return f"[{text}]({Path(relpath(path, page.parent)).as_posix()})"


def _label(template: str, row: Row) -> str:
    """The label of a row; empty where the row lacks a column of the template."""
    try:
        return template.format_map(row)
    except (KeyError, ValueError):
        return ""


MS, US = ("milliseconds", "stock", "kernel"), ("microseconds", "stock", "kernel")
TOKENS = ("tokens a second", "stock mlx-lm", "converted")
PEER = "tokens a second", "llama.cpp", "mlx-qlayers"
SAMPLING = ("milliseconds", "plain operators", "kernel")
EXPERTS = {"experts of {model}, M = {tokens:.0f}": ""}
FORMATS = {"{mode}, {bits:.0f} bits, {dtype}": ""}
FORWARD = {"product": "forward"}
WIDE = "32/32 D=64 L=4096 bfloat16"

# fmt: off
TABLES = [
    Table("generate", "generate.py --tokens 48", TOKENS,
        {"a prompt of 256 tokens": "prefill tok/s", "{tokens:.0f} tokens of text": "decode tok/s"},
        sides=("stock mlx-lm", "converted (auto)"), by="layers"),
    *(Table(stem, "llama_cpp.py", PEER,
        {f"a prompt of 256 tokens{how}": "prompt tok/s", f"text{how}": "text tok/s"},
        sides=("llama.cpp", name), by="SmolLM2-135M")
      for stem in ("llama_cpp", "llama_cpp_avx512")
      for how, name in {"": "mlx-qlayers", ", activations in 8 bits": "mlx-qlayers, int8"}.items()),
    Table("quantized_matmul", "quantized_matmul.py", MS,
        {"{shape}, {dtype}, M = {rows:.0f}": ""}, "3584 x 3584, .* M = (1|8|64)"),
    Table("gather_qmm", "gather_qmm.py", MS, EXPERTS, ".* M = (1|16)", where=FORWARD),
    Table("grid_sample", "grid_sample.py", SAMPLING, {"{task}": "ms"},
        "1x512x512x64 float32 bilinear.*", ("operators", "host"), "path"),
    Table("decode_cuda", "decode.py", TOKENS, {"{what}": "tokens/s"},
        sides=("stock", "converted"), by="layers"),
    Table("decode_contexts_cuda", "decode.py --contexts 16 4096 16384 32768", TOKENS,
        {"decode, {what}": "tokens/s"}, sides=("stock", "converted"), by="layers"),
    Table("server_cuda", "server.py --limit 110", TOKENS, {"{what}": "found"},
        ".*: speed", ("stock", "converted"), "process"),
    Table("server_cuda", "server.py --limit 110", (MS[0], *TOKENS[1:]), {"{what}": "found"},
        ".*: (first token|gap, p100)", ("stock", "converted"), "process"),
    Table("tuning_cuda", "tuning.py --tune --decode", (TOKENS[0], "untuned", "tuned"),
        {"decode, batch 1": "tokens/s"}, sides=("before", "after"), by="layers"),
    Table("quantized_few_cuda", "quantized_matmul.py --few", US, {"{shape}, M = {rows:.0f}": ""},
        ".* M = (1|4|16)", where={"format": "affine 4"}, scale=1e3),
    Table("quantized_many_cuda", "quantized_matmul.py --many", (MS[0], "stock", "mlx-qlayers"),
        {"{product}, M = {rows:,.0f}": ""},
        "(3584 x 3584|(gradient )?37888 x 3584), M = (64|128|512|2,048)", ("stock", "ours")),
    Table("gather_qmm_cuda", "gather_qmm.py", US, EXPERTS,
        "experts of Qwen3.* M = (1|16|128|512)", where=FORWARD, scale=1e3),
    Table("gather_qmm_formats_cuda", "gather_qmm.py --formats", US, FORMATS,
        ".*(bfloat16|float32)", where=FORWARD | {"tokens": 64}, scale=1e3),
    Table("gather_qmm_formats_cuda", "gather_qmm.py --formats", ("seconds", *MS[1:]), FORMATS,
        ".*bfloat16", ("first stock", "first kernel"), where=FORWARD | {"tokens": 64}),
    Table("attention_tiles_cuda", "attention_tiles.py", MS, {"{task}": "ms"},
        f"({WIDE}|32/8 D=128 L=16384 bfloat16 window 1024),.*", by="path"),
    Table("attention_tiles_cuda", "attention_tiles.py", ("", "unfused", "kernel"),
        {"{task}, ms": "ms", "{task}, MB": "MB"}, f"{WIDE},.*", ("unfused", "kernel"), "path"),
    Table("attention_decode_cuda", "attention.py", (US[0], "stock", "mlx-qlayers"),
        {"{keys:,.0f} keys, {cache}": ""}, "(32,768|131,072) keys.*", ("stock us", "auto us"),
        where={"q": "bfloat16", "calls": "compiled"}),
    Table("grid_sample_cuda", "grid_sample.py", SAMPLING, {"{task}": "ms"},
        "(8x1024x1024x64 float32 bilinear random|16x512x512x3 float16 .* rotation),.*",
        ("operators", "cuda"), "path"),
    Table("deformable", "deformable.py", SAMPLING, {"{task}": "ms"},
        sides=("operators", "host"), by="path"),
    Table("deformable_cuda", "deformable.py", SAMPLING, {"{task}": "ms"},
        sides=("operators", "cuda"), by="path"),
    Table("deformable_cuda", "deformable.py", ("milliseconds", "PyTorch", "kernel"),
        {"{task}": "ms"}, ".* float32,.*", ("torch", "cuda"), "path"),
]

# The one table of README.md: a label with its unit, and the row of a table above.
SUMMARY = {
    "shipped 11M model, decode, tokens/s": ("generate", "48 tokens of text"),
    "SmolLM2-135M in Q4_1, AVX-512, text, tokens/s; stock is llama.cpp":
        ("llama_cpp_avx512", "text"),
    "the same, activations in 8 bits": ("llama_cpp_avx512", "text, activations in 8 bits"),
    "the same, prompt of 256 tokens": ("llama_cpp_avx512", "a prompt of 256 tokens"),
    "7B, decode, batch 1, tokens/s": ("decode_contexts_cuda", "decode, context 16"),
    "7B, decode, batch 8, tokens/s": ("decode_cuda", "decode, batch 8"),
    "7B, prompt of 512 tokens, tokens/s": ("decode_cuda", "prefill 512"),
    "the same, of new lengths": ("decode_cuda", "prefill 512, new lengths"),
    "quantized product, M = 1, 37888 x 3584, us": ("quantized_few_cuda", "37888 x 3584, M = 1"),
    "quantized product, M = 4, 37888 x 3584, us": ("quantized_few_cuda", "37888 x 3584, M = 4"),
    "quantized product, M = 64, 3584 x 3584, ms": ("quantized_many_cuda", "3584 x 3584, M = 64"),
    "experts of Qwen3-30B-A3B, 128 tokens, us":
        ("gather_qmm_cuda", "experts of Qwen3-30B-A3B, M = 128"),
    "causal attention, L = 4096, ms": ("attention_tiles_cuda", f"{WIDE}, forward"),
    "the same with gradients, ms": ("attention_tiles_cuda", f"{WIDE}, with gradients"),
    "attention, 1 query, 131,072 keys in 8 bits, us":
        ("attention_decode_cuda", "131,072 keys, 8 bits"),
    "grid sampling with gradients, ms":
        ("grid_sample_cuda", "8x1024x1024x64 float32 bilinear random, with gradients"),
}
# fmt: on


def summary() -> str:
    """A row of each family, with the machine, the commit and the command."""
    cells: dict[tuple[str, str], tuple[str, ...]] = {}
    for table in TABLES:
        if results := read(table.stem):
            machine = _link(results.device, _path(table.stem), README)
            script = f"`bench_{table.command.split()[0]}`"
            for task, numbers in table.cells().items():
                mark = " \\*" if results.stale else ""
                cells[table.stem, task] = (machine, script, results.commit + mark, *numbers)
    rows = [(label, *cells[line]) for label, line in SUMMARY.items() if line in cells]
    heads = ("", "machine", "script", "commit", "stock", "mlx-qlayers", "ratio")
    note = (
        "\n\n\\* Kernels have changed since that commit." if any("*" in r[3] for r in rows) else ""
    )
    return markdown(heads, rows, texts=4) + note


def plots() -> str:
    """Those pictures that there are, two in a row."""
    kinds = {"cpu": "a CPU", "cuda": "an NVIDIA GPU", "metal": "an Apple GPU"}
    shown = []
    for (name, picture), (kind, machine) in product(PICTURES.items(), kinds.items()):
        if (path := RESULTS / "plots" / f"{name}_{kind}.png").exists():
            shown.append(f"!{_link(f'{picture.title} on {machine}', path, BENCHMARKS)}")
    if not shown:
        return "Not drawn yet."
    shown += [""] * (len(shown) % 2)
    first, *rest = zip(shown[::2], shown[1::2], strict=True)
    return markdown(first, rest, texts=2)


def checked() -> str:
    """The tests that ran on a GPU, and what the sanitizer reported of each run."""
    tests, sanitized = read("tests_cuda"), read("sanitize_cuda")
    if not tests or not sanitized:
        return "Not measured yet."
    runs = (
        f"{row['passed']:.0f} tests passed and {row['failed']:.0f} failed at {row['commit'][:8]}"
        for row in tests.rows[:2]
    )
    counts = ("errors", "launches", "kernels", "cases", "wrong")
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in sanitized.rows:
        key = (row["families"], *(f"{row[name]:.0f}" for name in counts))
        rows.setdefault(key, []).append(row["tool"])
    heads = ("tools", "families", *counts[:-1], "wrong results")
    table = markdown(heads, ((", ".join(tools), *row) for row, tools in rows.items()), texts=2)
    said, log = (
        f"({_link(text, _path(found.name), TESTING)}, {_commit(found)})"
        for text, found in (("runs", tests), ("log", sanitized))
    )
    return f"{tests.device}: {'; '.join(runs)} {said}.\nUnder `compute-sanitizer` {log}:\n\n{table}"


def whole(page: Path, *stems: str) -> str:
    """Results as their benchmark printed them, each under its command."""
    parts = []
    for stem in stems:
        if results := read(stem):
            heads = list(results.rows[0])
            rows = ([cell(row[head]) for head in heads] for row in results.rows)
            where = f"{_link('file', _path(stem), page)}, {results.device}, {_commit(results)}"
            said = filter(None, (f"`{results.facts['command']}`", results.facts.get("note")))
            parts.append(f"{', '.join(said)} ({where}):\n\n{markdown(heads, rows)}")
    return "\n\n".join(parts) or "Not measured yet."


QUANTIZATION = "quantization", "quantization_smollm2", "quantization_time"
# The results that no table of this page shows, or only in part.
OTHER = {
    "architectures_cuda": "Eight architectures: one sequence, eight, and a prompt",
    "architectures_float32_cuda": "Qwen3-Next beside float32",
    "architectures_small_cuda": "Small models of 121 architectures, beside other processes",
    "decode_batches_cuda": "Decoding in batches of up to 64, kernel by kernel",
    "decode_batched_caches_cuda": "Decoding in batches of 32 with quantized caches",
    "decode_caches_cuda": "Prompts and decoding with quantized caches",
    "distributed_cuda": "A model of Llama 70B's shape on one and two GPUs",
    "distributed_settings_cuda": "The same with and without CUDA graphs",
    "distributed_plan": "A simulation of larger models on up to 16 ranks",
    "distributed_check": "The simulation beside the measurement",
    "gptq_cuda": "GPTQ of a 7B model",
    "int8_cuda": "Products and prompts in 8-bit integers",
    "invariance_cuda": "The cost of batch-invariant results",
    "linalg_cuda": "Cholesky, triangular solves and QR beside PyTorch",
    "lora_curves": "Losses of 200 steps of training with adapters",
    "lora_curves_cuda": "The same in bfloat16, three seeds of each",
    "lora_loss_cuda": "The loss of an output layer of 152,064 words, forward and back",
    "lora_step_cuda": "A step of training of a 7B's 14 layers: time and memory",
    "lora_long_cuda": "The same of 28 layers with 16,384 tokens",
    "lora_shipped": "A step of training of the model that ships with the repository, on a CPU",
    "match_images": "Matching two pictures beside PyTorch, while other processes ran",
    "match_images_cuda": "Matching two pictures beside PyTorch",
    "peers_cuda": "Attention, small products and grid sampling beside PyTorch",
    "runtime": "Python time of a launch",
    "server_cuda": "Requests that arrive one after the other, with all percentiles of the gaps",
    "speculation_cuda": "Guesses that are right with a probability of 0.7",
    "speculation_text": "Text by verified look-ups of SmolLM2-135M on a CPU, and what rounds cost",
    "startup_cuda": "Start-up with empty caches, in a later process, and calibration",
    "tensor_cuda": "Metal 4 tensor kernels beside the others",
}


def others() -> str:
    """A row of every result that has no table: the file, its command and its commit."""
    rows = []
    for stem, title in OTHER.items():
        if results := read(stem):
            command = results.facts["command"].replace("|", "\\|")
            name = results.device if "simulated" not in results.device else "simulation"
            state = results.commit + (" \\*" if results.stale else "")
            rows.append((_link(title, _path(stem), BENCHMARKS), name, f"`{command}`", state))
    return f"{markdown(('result', 'machine', 'command', 'commit'), rows, texts=4)}\n\n\\* {STALE}"


STALE = "Kernels have changed since that commit; `python benchmarks/stored.py` lists all results."


def pages() -> dict[Path, dict[str, str]]:
    """The generated parts of each page, by the name of their place."""
    tables: dict[str, list[str]] = {}
    for table in TABLES:
        tables.setdefault(f"results {table.stem}", []).append(str(table))
    parts = {name: "\n\n".join(texts) for name, texts in tables.items()}
    return {
        README: {"summary": summary()},
        BENCHMARKS: {"plots": plots(), "others": others(), **parts},
        TESTING: {"checked": checked()},
        MODELS: {"quantization": whole(MODELS, *QUANTIZATION)},
        SERVING: {"caches": whole(SERVING, "kv_cache", "kv_cache_smollm2")},
    }


def filled(text: str, parts: Mapping[str, str]) -> str:
    """A page with its parts written anew.

    Raises:
        ValueError: a part has no place, or two.
    """
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end or mark in after:
            raise ValueError(f"there must be one place for {name}")
        text = f"{before}{mark}\n{part}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page, parts in pages().items():
        page.write_text(filled(page.read_text(), parts))
