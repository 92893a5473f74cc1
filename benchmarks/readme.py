"""Writes the tables of measurements in README.md, from the files in ``benchmarks/results``.

    python benchmarks/readme.py

A table stands between ``<!-- results STEM -->`` and ``<!-- end -->``, where STEM is the name of
its file. Which rows it has is said here, its numbers come from the file alone: run this after a
file has been replaced. Pictures and the sanitizer's results have places of the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common import RESULTS, significant
from stored import Results, Row

README = Path(__file__).parents[1] / "README.md"


@dataclass(frozen=True)
class Line:
    """One comparison.

    Attributes:
        task: what was measured.
        where: the values that single out the file's row, by column.
        stock, ours: the columns of both; or, if ``key`` is given, the values of that column in
            two rows.
        key: see there.
        value: the column with the number, if ``key`` is given.
        rate: whether more is better.
    """

    task: str
    where: Mapping[str, str | int]
    stock: str = "stock"
    ours: str = "kernel"
    key: str = ""
    value: str = "ms"
    rate: bool = False

    def cells(self, rows: list[Row], scale: float) -> tuple[str, ...] | None:
        """The row of the table, or None where the file has nothing about it."""
        names = (self.stock, self.ours)
        if self.key:
            found = [_find(rows, {**self.where, self.key: name}, self.value) for name in names]
        else:
            found = [_find(rows, self.where, name) for name in names]
        stock, ours = found
        if stock is None or ours is None:
            return None
        times = ours / stock if self.rate else stock / ours
        return self.task, *(significant(scale * x) for x in found), f"{significant(times)}x"


def _find(rows: list[Row], where: Mapping[str, str | int], column: str) -> float | None:
    """The number in a column of the row that is wanted."""
    for row in rows:
        if all(row.get(key) == value for key, value in where.items()) and row.get(column):
            return float(row[column])
    return None


def _path(stem: str) -> Path:
    found = [path for kind in ("csv", "json") if (path := RESULTS / f"{stem}.{kind}").exists()]
    return found[0] if found else RESULTS / f"{stem}.csv"


@cache
def read(stem: str) -> Results | None:
    """What a benchmark has written, if it has."""
    path = _path(stem)
    return Results.read(path) if path.exists() else None


@dataclass(frozen=True)
class Table:
    """The table of one file.

    Attributes:
        stem: the file's name without its ending.
        command: what measures it.
        columns: the heads of the three columns that are named here; the last is the ratio.
        lines: the rows.
        scale: the file's unit in that of the table.
    """

    stem: str
    command: str
    columns: tuple[str, str, str]
    lines: list[Line]
    scale: float = 1.0

    def __str__(self) -> str:
        found = read(self.stem)
        rows = found.rows if found else []
        cells = [row for line in self.lines if (row := line.cells(rows, self.scale))]
        if not found or not cells:
            return f"Not measured yet: `python {self.command}` prints this table."
        file = _path(self.stem).relative_to(README.parent).as_posix()
        day, mlx = found.facts["date"].split()[0], found.facts["mlx"]
        caption = f"{found.device}, MLX {mlx}, {day}, `python {self.command}`, [file]({file}):"
        heads = ["| " + " | ".join((*self.columns, "times")) + " |", "|---|--:|--:|--:|"]
        return "\n".join([caption, "", *heads, *(f"| {' | '.join(row)} |" for row in cells)])


def products(where: dict[str, str], counts: tuple[int, ...], ours: str = "kernel") -> list[Line]:
    """Quantized products with M rows."""
    name = ", ".join(value for value in where.values() if value != "affine 4")
    return [Line(f"{name}, M = {m:,}", {**where, "rows": m}, ours=ours) for m in counts]


def pairs(where: str, names: tuple[str, str]) -> list[Line]:
    """Forward, and with gradients."""
    return [
        Line(f"{where}, {way}", {"task": f"{where}, {way}"}, *names, key="path")
        for way in ("forward", "with gradients")
    ]


BENCH = "benchmarks/bench_"
MS, US = ("milliseconds", "stock", "kernel"), ("microseconds", "stock", "kernel")
SHIPPED = {"key": "layers", "stock": "stock mlx-lm", "ours": "converted (auto)", "rate": True}
SEVEN = {"key": "layers", "value": "tokens/s", "ours": "converted", "rate": True}
LAYER = "3584 x 3584"
UNFUSED = ("unfused", "kernel")
WIDE, LONG = "32/32 D=64 L=4096 bfloat16", "32/8 D=128 L=16384 bfloat16"
MEMORY = {"task": f"{WIDE}, with gradients"}

TABLES = [
    Table(
        "generate",
        f"{BENCH}generate.py --tokens 48",
        ("tokens a second", "stock mlx-lm", "converted"),
        [
            Line("a prompt of 256 tokens", {}, value="prefill tok/s", **SHIPPED),
            Line("48 tokens of text", {}, value="decode tok/s", **SHIPPED),
        ],
    ),
    Table(
        "quantized_matmul",
        f"{BENCH}quantized_matmul.py",
        MS,
        [
            *products({"shape": LAYER, "dtype": "bfloat16"}, (1, 8, 64)),
            *products({"shape": LAYER, "dtype": "float16"}, (1, 8)),
            *products({"shape": LAYER, "dtype": "float32"}, (1, 64)),
        ],
    ),
    Table(
        "gather_qmm",
        f"{BENCH}gather_qmm.py",
        MS,
        [
            Line(
                f"experts of {model}, M = {m}",
                {"model": model, "product": "forward", "tokens": m},
            )
            for model in ("Qwen3-30B-A3B", "Qwen1.5-MoE-A2.7B")
            for m in (1, 16)
        ],
    ),
    Table(
        "grid_sample",
        f"{BENCH}grid_sample.py",
        ("milliseconds", "plain operators", "kernel"),
        [
            *pairs("1x512x512x64 float32 bilinear rotation", ("operators", "host")),
            *pairs("1x512x512x64 float32 bilinear random", ("operators", "host")),
        ],
    ),
    Table(
        "decode_cuda",
        f"{BENCH}decode.py",
        ("tokens a second", "stock mlx-lm", "converted"),
        [
            Line("text, one at a time", {"what": "decode, batch 1"}, **SEVEN),
            Line("text, 8 at a time", {"what": "decode, batch 8"}, **SEVEN),
            Line("a prompt of 512 tokens", {"what": "prefill 512"}, **SEVEN),
        ],
    ),
    Table(
        "tuning_cuda",
        f"{BENCH}tuning.py --tune --decode",
        ("tokens a second", "untuned", "tuned"),
        [Line("text, one at a time", {}, "before", "after", "layers", value="tokens/s", rate=True)],
    ),
    Table(
        "quantized_few_cuda",
        f"{BENCH}quantized_matmul.py --few",
        US,
        [
            line
            for shape in (LAYER, "37888 x 3584", "3584 x 18944", "152064 x 3584")
            for line in products({"shape": shape, "format": "affine 4"}, (1, 4, 16))
        ],
        scale=1e3,
    ),
    Table(
        "quantized_many_cuda",
        f"{BENCH}quantized_matmul.py --many",
        ("milliseconds", "stock", "here"),
        [
            *products({"product": LAYER}, (64, 512), "ours"),
            *products({"product": "37888 x 3584"}, (64, 128, 512, 2048), "ours"),
            *products({"product": "gradient 37888 x 3584"}, (512, 2048), "ours"),
        ],
    ),
    Table(
        "gather_qmm_cuda",
        f"{BENCH}gather_qmm.py",
        US,
        [
            Line(
                f"experts of Qwen3-30B-A3B, M = {m}",
                {"model": "Qwen3-30B-A3B", "product": "forward", "tokens": m},
            )
            for m in (1, 16, 128, 512)
        ],
        scale=1e3,
    ),
    Table(
        "attention_tiles_cuda",
        f"{BENCH}attention_tiles.py",
        ("milliseconds", "stock", "kernel"),
        [
            *pairs(WIDE, ("stock", "kernel")),
            Line(f"{WIDE}, forward; stock unfused", {"task": f"{WIDE}, forward"}, *UNFUSED, "path"),
            Line(f"{WIDE}, with gradients; stock unfused", MEMORY, *UNFUSED, "path"),
            Line("the same, in MB of memory", MEMORY, *UNFUSED, "path", "MB"),
            *pairs(f"{LONG} window 1024", ("stock", "kernel")),
        ],
    ),
    Table(
        "attention_decode_cuda",
        f"{BENCH}attention.py --decode",
        ("microseconds", "stock", "here"),
        [
            Line(
                f"{keys:,} keys, {cache}",
                {"q": "bfloat16", "calls": "compiled", "cache": cache, "keys": keys},
                "stock us",
                "auto us",
            )
            for cache in ("bfloat16", "8 bits", "4 bits")
            for keys in (32768, 131072)
        ],
    ),
    Table(
        "grid_sample_cuda",
        f"{BENCH}grid_sample.py",
        ("milliseconds", "plain operators", "kernel"),
        [
            *pairs("8x1024x1024x64 float32 bilinear random", ("operators", "cuda")),
            *pairs("16x512x512x3 float16 bilinear rotation", ("operators", "cuda")),
            *pairs("16x512x512x3 float16 bicubic rotation", ("operators", "cuda")),
        ],
    ),
]

# What is shown side by side: at the head, and with the results.
PLOTS = {
    "speed": {
        "tokens_per_second_cpu": "Tokens a second of the shipped model on a CPU",
        "tokens_per_second_cuda": "Tokens a second of a model of Qwen2-7B's shape on an H200",
    },
    "plots": {
        "quantized_matmul_rows_cpu": "Quantized products by rows on a CPU",
        "quantized_matmul_rows_cuda": "Quantized products by rows on an H200",
        "attention_memory_cuda": "Memory of attention by length on an H200",
        "attention_decode_cuda": "Attention of one query by length on an H200",
        "grid_sample_cpu": "Grid sampling on a CPU",
        "grid_sample_cuda": "Grid sampling on an H200",
    },
}
_CHECKED = re.compile(
    r"^(\w+): (\d+) errors; (\d+) launches of (\d+) kernels in (\d+) cases, (\d+) "
)


def plots(titles: Mapping[str, str]) -> str:
    """Those pictures that there are, two in a row."""
    paths = {RESULTS / "plots" / f"{stem}.png": title for stem, title in titles.items()}
    shown = [
        f"![{title}]({path.relative_to(README.parent).as_posix()})"
        for path, title in paths.items()
        if path.exists()
    ]
    if not shown:
        return "Not drawn yet."
    shown += [""] * (len(shown) % 2)
    rows = [" | ".join(shown[i : i + 2]) for i in range(0, len(shown), 2)]
    return "\n".join([f"| {rows[0]} |", "|---|---|", *(f"| {row} |" for row in rows[1:])])


def checked() -> str:
    """What the sanitizer said of the families of each run."""
    runs = (RESULTS / "sanitize_kernels_cuda.txt").read_text().split("families: ")[1:]
    rows: list[tuple[str, ...]] = []
    for families, *lines in (run.splitlines() for run in runs):
        found = [match.groups() for line in lines if (match := _CHECKED.match(line))]
        rows += [(tool, families, *numbers) for tool, *numbers in found]
    heads = ("tool", "families", "errors", "launches", "kernels", "cases", "wrong results")
    table = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([table[0], "|---|---|--:|--:|--:|--:|--:|", *table[1:]])


def updated(text: str) -> str:
    """The README with the tables that the files give.

    Raises:
        ValueError: a table has no place, or two.
    """
    parts = {f"results {table.stem}": str(table) for table in TABLES}
    parts |= {name: plots(titles) for name, titles in PLOTS.items()} | {"checked": checked()}
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end or mark in after:
            raise ValueError(f"README.md must have one place for {name}")
        text = f"{before}{mark}\n{part}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
