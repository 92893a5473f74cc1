"""Draws the pictures of the README from the files that the benchmarks write.

    python benchmarks/plot.py benchmarks/results

A folder holds a run of one machine (``decode.csv``), or several with the machine's kind at the end
of the name (``decode_cuda.csv``; without one it is a CPU's). Pictures go to its folder ``plots``.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
# Colours that readers with colour blindness can tell apart (Okabe and Ito).
STOCK, OURS, OTHER, FOURTH = "#999999", "#0072B2", "#E69F00", "#009E73"
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.5,
    "grid.alpha": 0.35,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Results:
    """What one benchmark wrote: the facts of the machine, and the rows of its tables."""

    facts: dict[str, str]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Results:
        """From a CSV or JSON file, with numbers as numbers and tasks repeated in every row."""
        if path.suffix == ".json":
            found = json.loads(path.read_text())
            return cls(found["machine"], _filled(found["rows"]))
        lines = path.read_text().splitlines()
        facts = [line[2:].partition(": ") for line in lines if line.startswith("# ")]
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        numbers = [{key: _number(cell) for key, cell in row.items()} for row in rows]
        return cls({key: value for key, _, value in facts}, _filled(numbers))

    @property
    def device(self) -> str:
        """The name of the GPU, or of the processor."""
        kind, _, name = self.facts["device"].partition("), ")
        return self.facts["cpu"] if "cpu" in kind else name

    @property
    def caption(self) -> str:
        """When it was measured, and with what."""
        versions = (f"{name} {self.facts.get(name, '?')}" for name in ("mlx", "mlx-lm"))
        commit = self.facts.get("commit", "")
        return ", ".join(
            [self.facts["date"], *versions, *([f"commit {commit[:12]}"] if commit else [])]
        )


def _filled(rows: list[Row]) -> list[Row]:
    """A task is written in the first of its rows only."""
    task = ""
    for row in rows:
        task = row.get("task") or task
        if "task" in row:
            row["task"] = task
    return rows


def _number(cell: str | None) -> Any:
    try:
        return float(cell or "")
    except ValueError:
        return cell or ""


Drawing = Callable[["list[Axes]", dict[str, Results]], None]


@dataclass(frozen=True)
class Picture:
    """A picture, the benchmarks whose results it may show, and how many plots of bars it has."""

    title: str
    sources: tuple[str, ...]
    draw: Drawing
    bars: int = 0


def quantized_matmul_rows(axes: list[Axes], found: dict[str, Results]) -> None:
    """Weights read a second against the rows of x: where it falls, arithmetic is the limit."""
    (axis,) = axes
    lines: dict[tuple[str, str], dict[float, float]] = {}
    for rows in (r.rows for name, r in found.items() if name.startswith("quantized")):
        for row in rows:
            shape = str(row.get("shape") or row["product"])
            if not _is_shown(row, shape, "quantized_few" in found):
                continue
            n, k = (int(part) for part in shape.split(" x "))
            for label, milliseconds in _products(row).items():
                points = lines.setdefault((shape, label), {})
                points[row["rows"]] = n * k * (4 + 32 / 64) / 8 / milliseconds / 1e6
    shapes = list(dict.fromkeys(shape for shape, _ in lines))
    for (shape, label), points in lines.items():
        colour = (OURS, OTHER)[shapes.index(shape)]
        name = f"{label}, {shape}" if len(shapes) > 1 else label
        style = _PRODUCTS[label]
        axis.plot(*zip(*sorted(points.items()), strict=True), style, color=colour, label=name)
    axis.set(xscale="log", yscale="log", xlabel="rows of x", ylabel="packed weights read, GB/s")
    _plain_powers(axis, {x for points in lines.values() for x in points})
    axis.legend(fontsize=9)


_PRODUCTS = {
    "stock": "--s",
    "dequantized and dense": ":^",
    "ours, MLX operators": "-.^",
    "ours": "-o",
}


def _products(row: Row) -> dict[str, float]:
    """Milliseconds of what is drawn of a row, by its name in the legend."""
    columns = {
        "stock": "stock",
        "dequantized and dense": "dense",
        "ours, MLX operators": "reference",
        "ours": "ours" if "ours" in row else "kernel",
    }
    times = {label: row.get(column) for label, column in columns.items()}
    return {label: time for label, time in times.items() if isinstance(time, float)}


def _is_shown(row: Row, shape: str, gpu: bool) -> bool:
    if not gpu:
        return bool(row["dtype"] == "bfloat16" and shape == "1024 x 1024")
    return (
        shape in ("37888 x 3584", "152064 x 3584") and row.get("format", "affine 4") == "affine 4"
    )


_TASK = re.compile(r"(\d+)/(\d+) D=(\d+) L=(\d+) (\w+)(.*), (forward|with gradients)")


def _cases(results: Results) -> Iterator[tuple[re.Match[str], Row]]:
    """Rows of the attention table, with the parts of their task."""
    for row in results.rows:
        if task := _TASK.match(row["task"]):
            yield task, row


def attention_memory(axes: list[Axes], found: dict[str, Results]) -> None:
    """Peak memory of training attention against the length, and the time of some lengths."""
    (axis,) = axes
    lines: dict[str, dict[int, float]] = {"unfused": {}, "stock": {}, "kernel": {}}
    for task, row in _cases(found["attention_tiles"]):
        heads, kv_heads, width, length, _, options, what = task.groups()
        alike = (heads, kv_heads, width) == ("32", "8", "128") and not options
        if alike and what == "with gradients" and row["path"] in lines:
            lines[row["path"]][int(length)] = row["MB"]
    names = {"unfused": "separate operators", "stock": "stock operator", "kernel": "ours"}
    styles = {"unfused": (OTHER, ":^"), "stock": (STOCK, "--s"), "kernel": (OURS, "-o")}
    for path, points in lines.items():
        if points:
            colour, style = styles[path]
            axis.plot(
                *zip(*sorted(points.items()), strict=True), style, color=colour, label=names[path]
            )
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="tokens (32 query and 8 key heads of 128, causal)",
        ylabel="peak memory, forward and backward, MB",
    )
    _plain_powers(axis, {x for points in lines.values() for x in points}, thousands=True)
    axis.legend()


def tokens_per_second(axes: list[Axes], found: dict[str, Results]) -> None:
    """Prefill and decoding of a model, stock and converted."""
    table: dict[str, dict[str, float]] = {}
    if "decode" in found:
        for row in found["decode"].rows:
            if row.get("what"):
                table.setdefault(row["what"], {})[row["layers"]] = row["tokens/s"]
    else:
        for row in found["generate"].rows:
            for what in ("decode", "prefill"):
                key = f"{what}, {row['model']}"
                table.setdefault(key, {})[row["layers"]] = row[f"{what} tok/s"]
    for axis, what in zip(axes, ("decode", "prefill"), strict=True):
        names = {name: re.sub(rf"{what},? ", "", name) for name in table if what in name}
        groups = {f"{n} tokens" if n.isdigit() else n: table[name] for name, n in names.items()}
        _bars(axis, groups, "tokens/s")
        axis.set_title(what, fontsize=9.5)


def grid_sample(axes: list[Axes], found: dict[str, Results]) -> None:
    """Milliseconds of every task by every path."""
    groups: dict[str, dict[str, float]] = {}
    for row in found["grid_sample"].rows:
        groups.setdefault(row["task"], {})[row["path"]] = row["ms"]
    names = {"operators": "plain MLX operators", "reference": "ours, MLX operators"}
    groups = {
        fill(re.sub(r"(?<=\d)x(?=\d)", "\N{MULTIPLICATION SIGN}", task), 26): {
            names.get(path, "ours, kernel"): ms for path, ms in paths.items()
        }
        for task, paths in groups.items()
    }
    _bars(axes[0], groups, "milliseconds, shorter is better", horizontal=True)


def attention_decode(axes: list[Axes], found: dict[str, Results]) -> None:
    """Microseconds of one query over a cache, against the keys in it."""
    (axis,) = axes
    rows = [r for r in found["attention_decode"].rows if r.get("calls", "compiled") == "compiled"]
    rows = rows or found["attention_decode"].rows
    caches = list(dict.fromkeys(r["cache"] for r in rows if r["q"] == "bfloat16"))
    for cache, colour in zip(caches, (OURS, OTHER, FOURTH), strict=False):
        part = [r for r in rows if r["cache"] == cache and r["q"] == "bfloat16"]
        keys = [r["keys"] for r in part]
        ours = [r["auto us"] if "auto us" in r else r["us"] for r in part]
        axis.plot(keys, [r["stock us"] for r in part], "--s", color=colour, label=f"stock, {cache}")
        axis.plot(keys, ours, "-o", color=colour, label=f"ours, {cache}")
    axis.set(xscale="log", yscale="log", xlabel="keys in the cache", ylabel="microseconds a layer")
    _plain_powers(axis, {r["keys"] for r in rows}, thousands=True)
    axis.set_ylim(top=4 * axis.get_ylim()[1])  # for the legend
    axis.legend(fontsize=9, ncols=len(caches), loc="upper left")


def gather_qmm(axes: list[Axes], found: dict[str, Results]) -> None:
    """Milliseconds of the experts' first projection against the tokens."""
    (axis,) = axes
    rows = [r for r in found["gather_qmm"].rows if r.get("product") == "forward"]
    for model, colour in zip(dict.fromkeys(r["model"] for r in rows), (OURS, OTHER), strict=False):
        part = [r for r in rows if r["model"] == model]
        tokens = [r["tokens"] for r in part]
        axis.plot(tokens, [r["stock"] for r in part], "--s", color=colour, label=f"stock, {model}")
        axis.plot(tokens, [r["kernel"] for r in part], "-o", color=colour, label=f"ours, {model}")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
    _plain_powers(axis, {r["tokens"] for r in rows})
    axis.legend(fontsize=9)


def _bars(
    axis: Axes, groups: dict[str, dict[str, float]], unit: str, *, horizontal: bool = False
) -> None:
    """Bars beside each other, a colour for each name in a group, their values written on them."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    colours = dict(zip(names, (STOCK, OTHER, OURS, FOURTH), strict=False))
    if len(names) == 2:
        colours[names[1]] = OURS
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        values = [group.get(name, 0.0) for group in groups.values()]
        draw = axis.barh if horizontal else axis.bar
        bars = draw(places, values, width * 0.92, color=colours[name], label=name)
        axis.bar_label(bars, [_short(v) for v in values], fontsize=8, padding=2)
    ticks = range(len(groups)), list(groups)
    if horizontal:
        axis.set_yticks(*ticks, fontsize=8.5)
        axis.set(xscale="log", xlabel=unit)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.grid(visible=False, axis="y")
    else:
        axis.set_xticks(*ticks)
        axis.set_ylabel(unit)
        axis.margins(y=0.1)
        axis.grid(visible=False, axis="x")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value else ""


def _plain_powers(axis: Axes, values: set[float], *, thousands: bool = False) -> None:
    """Tick the values that were measured, written out."""
    shown = sorted(v for v in values if v > 0 and float(v).is_integer() and not int(v) & int(v) - 1)
    labels = [f"{v / 1024:g}k" if thousands and v >= 1024 else f"{v:g}" for v in shown]
    axis.set_xticks(shown, labels)
    axis.minorticks_off()


PICTURES = {
    "quantized_matmul_rows": Picture(
        "quantized products, bfloat16, 4 bits",
        ("quantized_few", "quantized_many", "quantized_matmul"),
        quantized_matmul_rows,
    ),
    "attention_memory": Picture("memory of attention", ("attention_tiles",), attention_memory),
    "tokens_per_second": Picture(
        "text from a 4-bit model", ("decode", "generate"), tokens_per_second, bars=2
    ),
    "grid_sample": Picture("grid sampling", ("grid_sample",), grid_sample, bars=1),
    "attention_decode": Picture(
        "attention of one token over a cache", ("attention_decode",), attention_decode
    ),
    "gather_qmm": Picture("products with experts", ("gather_qmm",), gather_qmm),
}


def draw(folder: Path) -> list[Path]:
    """Draw every picture for which there are results in a folder; the files written.

    Raises:
        FileNotFoundError: there are none.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    written = []
    with rc_context(STYLE):
        for name, picture in PICTURES.items():
            for machine, found in _by_machine(folder, picture.sources).items():
                one = next(iter(found.values()))
                figure = Figure(figsize=(6.4, 4.2), dpi=160, layout="constrained")
                picture.draw(_plots(figure, picture.bars), found)
                lines = [line for axis in figure.axes for line in axis.lines]
                if lines and all(len(line.get_xydata()) < 2 for line in lines):
                    continue  # one length makes no curve
                if picture.bars:  # which leave no room for a legend
                    top, first, *_ = figure.axes
                    handles, labels = first.get_legend_handles_labels()
                    top.legend(handles, labels, loc="center", ncols=len(labels), fontsize=9)
                figure.suptitle(f"{picture.title}: {one.device}", fontsize=10.5)
                figure.supxlabel(one.caption, fontsize=8, color="#666666")
                path = folder / "plots" / f"{name}_{machine}.png"
                path.parent.mkdir(exist_ok=True)
                figure.savefig(path, metadata={"Software": None})
                written.append(path)
    if not written:
        raise FileNotFoundError(f"{folder}: no results of benchmarks in it")
    return written


def _plots(figure: Figure, bars: int) -> list[Axes]:
    """One plot, or so many of bars below a place for their legend."""
    if not bars:
        return [figure.subplots()]
    grid = figure.add_gridspec(2, bars, height_ratios=(0.04, 1))
    figure.add_subplot(grid[0, :]).set_axis_off()
    return [figure.add_subplot(grid[1, i]) for i in range(bars)]


def _by_machine(folder: Path, sources: tuple[str, ...]) -> dict[str, dict[str, Results]]:
    """Results by kind of machine and benchmark."""
    found: dict[str, dict[str, Results]] = {}
    for source in sources:
        pattern = re.compile(rf"{source}(?:_(cuda|metal))?\.(?:csv|json)")
        for path in sorted(folder.glob(f"{source}*")):
            if match := pattern.fullmatch(path.name):
                results = Results.read(path)
                machine = match[1] or _kind(results)
                found.setdefault(machine, {}).setdefault(source, results)
    return found


def _kind(results: Results) -> str:
    backend = results.facts["backend"].partition(" ")[0]
    return backend if backend in ("cuda", "metal") else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    print(*draw(parser.parse_args().folder), sep="\n")


if __name__ == "__main__":
    main()
