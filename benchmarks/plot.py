"""Draws the pictures of docs/benchmarks.md from the files that the benchmarks write.

    mlx-qlayers bench --from benchmarks/results

A folder holds a run of one machine (``decode.csv``), or several with the machine's kind at the end
of the name (``decode_cuda.csv``; without one it is a CPU's). Pictures go to its folder ``plots``.
They are made to be read at 400 pixels, two of them beside each other on a page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stored import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that readers with colour blindness can tell apart (Okabe and Ito).
STOCK, OURS, OTHER, FOURTH = "#888888", "#0072B2", "#E69F00", "#009E73"
STOCK_CURVE, OUR_CURVE = ("--s", STOCK), ("-o", OURS)
SIZE, DPI = (4.8, 3.6), 200
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9.5,
    "grid.alpha": 0.35,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.markersize": 5,
}
Drawing = Callable[["Figure", dict[str, Results]], None]
Points = dict[float, float]


@dataclass(frozen=True)
class Picture:
    """A picture, and the benchmarks whose results it may show."""

    title: str
    sources: tuple[str, ...]
    draw: Drawing


def quantized_matmul_rows(figure: Figure, results: dict[str, Results]) -> None:
    """Weights read a second against the rows of x: where it falls, arithmetic is the limit."""
    # The first projection of Qwen2-7B's feed-forward layers; a CPU measures every number of rows
    # with a smaller matrix.
    shape = "1024 x 1024" if "quantized_matmul" in results else "37888 x 3584"
    n, k = (int(part) for part in shape.split(" x "))
    gigabytes = n * k * (4 + 32 / 64) / 8 / 1e9
    columns = {
        "stock": "stock",
        "dequantized, dense": "dense",
        "ours, MLX operators": "reference",
        "ours": "kernel",
    }
    lines: dict[str, Points] = {label: {} for label in columns}
    for row in (row for one in results.values() for row in one.rows):
        alike = row.get("dtype", "bfloat16") == "bfloat16"
        alike &= row.get("format", "affine 4") == "affine 4"
        if not alike or row.get("shape", row.get("product")) != shape:
            continue
        for label, column in columns.items():
            time = row.get("ours") if label == "ours" and "ours" in row else row.get(column)
            if isinstance(time, float):
                lines[label][row["rows"]] = gigabytes / time * 1e3
    axis = _curves(figure, lines, {"stock": STOCK_CURVE, "ours": OUR_CURVE})
    axis.set(xlabel=f"rows of x (matrix {shape})", ylabel="packed weights read, GB/s")


def attention_memory(figure: Figure, results: dict[str, Results]) -> None:
    """Peak memory of training attention against the length."""
    names = {"unfused": "plain operators", "stock": "stock operator", "kernel": "ours"}
    lines: dict[str, Points] = {name: {} for name in names.values()}
    for task, row in _cases(results["attention_tiles"]):
        heads, kv_heads, width, length, _, options, what = task.groups()
        alike = (heads, kv_heads, width) == ("32", "8", "128") and not options
        if alike and what == "with gradients" and row["path"] in names:
            lines[names[row["path"]]][int(length)] = row["MB"]
    styles = {"stock operator": STOCK_CURVE, "ours": OUR_CURVE}
    axis = _curves(figure, lines, styles, thousands=True)
    axis.set(
        xlabel="tokens (32 query and 8 key heads of 128, causal)",
        ylabel="forward and backward, MB",
    )


_TASK = re.compile(r"(\d+)/(\d+) D=(\d+) L=(\d+) (\w+)(.*), (forward|with gradients)")


def _cases(results: Results) -> Iterator[tuple[re.Match[str], Row]]:
    """Rows of the attention table, with the parts of their task."""
    for row in results.rows:
        if task := _TASK.match(row["task"]):
            yield task, row


def attention_decode(figure: Figure, results: dict[str, Results]) -> None:
    """Microseconds of one query over a cache, against the keys in it."""
    rows = [row for row in results["attention_decode"].rows if row["q"] == "bfloat16"]
    rows = [row for row in rows if row["calls"] == "compiled"] or rows
    stock, ours = (_by(rows, "cache", "keys", f"{who} us") for who in ("stock", "auto"))
    axis = _pairs(figure, stock, ours, thousands=True)
    axis.set(xlabel="keys in the cache", ylabel="microseconds a layer")


def gather_qmm(figure: Figure, results: dict[str, Results]) -> None:
    """Milliseconds of the experts' first projection against the tokens."""
    rows = [row for row in results["gather_qmm"].rows if row.get("product") == "forward"]
    stock, ours = (_by(rows, "model", "tokens", who) for who in ("stock", "kernel"))
    axis = _pairs(figure, stock, ours)
    axis.set(xlabel="tokens", ylabel="milliseconds")


def _by(rows: list[Row], kind: str, x: str, y: str) -> dict[str, Points]:
    """A curve for each kind; what was not measured has no point."""
    return {
        name: {row[x]: row[y] for row in rows if row[kind] == name and row.get(y)}
        for name in dict.fromkeys(row[kind] for row in rows)
    }


_LAYERS = {
    "stock": "stock mlx-lm",
    "stock mlx-lm": "stock mlx-lm",
    "converted (auto)": "converted",
    "converted": "converted",
}
_COLOURS = {"stock mlx-lm": STOCK, "converted": OURS}


def tokens_per_second(figure: Figure, results: dict[str, Results]) -> None:
    """Decoding and prefill of a model, stock and converted."""
    plots: dict[str, dict[str, dict[str, float]]] = {"decode": {}, "prefill": {}}
    if "decode" in results:
        for row in results["decode"].rows:
            if row.get("what") and row["layers"] in _LAYERS:
                what, _, size = row["what"].partition(" ")
                group = plots[what.rstrip(",")].setdefault(size, {})
                group[_LAYERS[row["layers"]]] = row["tokens/s"]
    else:
        for row in results["generate"].rows:
            if row["layers"] in _LAYERS:
                for what, plot in plots.items():
                    group = plot.setdefault(row["model"], {})
                    group[_LAYERS[row["layers"]]] = row[f"{what} tok/s"]
    grid = figure.add_gridspec(1, 2, width_ratios=[max(1, len(p)) for p in plots.values()])
    for cell, (what, groups) in zip(grid, plots.items(), strict=True):
        axis = figure.add_subplot(cell)
        _bars(axis, groups)
        axis.set_title(what)
        if any(name.isdigit() for name in groups):
            axis.set_xlabel("prompt, tokens")
    figure.axes[0].set_ylabel("tokens a second")


def grid_sample(figure: Figure, results: dict[str, Results]) -> None:
    """Milliseconds of every task by every path, those of one task beside each other."""
    names = {"operators": "plain MLX operators", "reference": "ours, MLX operators"}
    lines: dict[str, list[float]] = {label: [] for label in (*names.values(), "ours")}
    tasks = list(dict.fromkeys(row["task"] for row in results["grid_sample"].rows))
    for row in results["grid_sample"].rows:
        lines[names.get(row["path"], "ours")].append(row["ms"])
    axis = figure.subplots()
    for i, (label, times) in enumerate((k, v) for k, v in lines.items() if v):
        colour = {"ours": OURS, "plain MLX operators": STOCK}.get(label, OTHER)
        places = [y + 0.27 * (i - 1) for y in range(len(times))]
        bars = axis.barh(places, times, 0.25, color=colour, label=label)
        axis.bar_label(bars, [_short(time) for time in times], fontsize=7.5, padding=2)
    labels = [task.replace(" ", "\n", 1) for task in tasks]
    axis.set_yticks(range(len(tasks)), labels, fontsize=7)
    axis.set(xscale="log", xlabel="milliseconds")
    axis.invert_yaxis()
    axis.margins(x=0.2)
    _plain(axis, "x")
    axis.grid(visible=False, axis="y")


def _curves(
    figure: Figure,
    lines: Mapping[str, Points],
    styles: Mapping[str, tuple[str, str]],
    *,
    thousands: bool = False,
) -> Axes:
    """Curves of contenders on logarithmic axes; one without points is left out."""
    axis = figure.subplots()
    for label, points in lines.items():
        if points:
            style, colour = styles.get(label, (":^", OTHER))
            axis.plot(*zip(*sorted(points.items()), strict=True), style, color=colour, label=label)
    axis.set(xscale="log", yscale="log")
    # Ticks where powers of two were measured.
    measured = sorted({x for points in lines.values() for x in points})
    shown = [x for x in measured if x > 0 and not int(x) & int(x) - 1]
    labels = [f"{x / 1024:g}k" if thousands and x >= 1024 else f"{x:g}" for x in shown]
    axis.set_xticks(shown, labels)
    axis.minorticks_off()
    _plain(axis, "y")
    return axis


def _pairs(
    figure: Figure,
    stock: Mapping[str, Points],
    ours: Mapping[str, Points],
    *,
    thousands: bool = False,
) -> Axes:
    """Curves of stock and ours, a colour for each kind."""
    lines: dict[str, Points] = {}
    styles: dict[str, tuple[str, str]] = {}
    for kind, colour in zip(ours, (OURS, OTHER, FOURTH), strict=False):
        for who, style, points in (("stock", "--s", stock[kind]), ("ours", "-o", ours[kind])):
            lines[f"{who}, {kind}"], styles[f"{who}, {kind}"] = points, (style, colour)
    return _curves(figure, lines, styles, thousands=thousands)


def _plain(axis: Axes, which: str) -> None:
    """Numbers written out along a logarithmic axis, and enough of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = getattr(axis, f"get_{which}lim")()
    steps = (1.0,) if high / low > 80 else (1.0, 2.0, 5.0)
    of = getattr(axis, f"{which}axis")
    of.set_major_locator(LogLocator(subs=steps, numticks=20))
    of.set_minor_locator(NullLocator())
    of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _legend(figure: Figure, title: str) -> None:
    """One for the whole picture, above it and below its title; pairs below each other."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = len(labels) // 2 if len(labels) > 3 else len(labels)
    options = {"handlelength": 1.6, "columnspacing": 1.2, "title_fontsize": 10.5}
    figure.legend(
        handles, labels, loc="outside upper center", ncols=columns, title=title, **options
    )


def _bars(axis: Axes, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Bars beside each other, their values written on them."""
    used = {name for group in groups.values() for name in group}
    names = [name for name in _COLOURS if name in used]
    width = 0.84 / max(1, len(names))
    for i, name in enumerate(names):
        centres = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        values = [group.get(name, float("nan")) for group in groups.values()]
        bars = axis.bar(centres, values, width * 0.92, color=_COLOURS[name], label=name)
        axis.bar_label(bars, [_short(value) for value in values], fontsize=8, padding=1)
    axis.set_xticks(range(len(groups)), list(groups))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(y=0.1)
    axis.grid(visible=False, axis="x")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value > 0 else ""


PICTURES = {
    "quantized_matmul_rows": Picture(
        "Quantized products, bfloat16, 4 bits",
        ("quantized_few", "quantized_many", "quantized_matmul"),
        quantized_matmul_rows,
    ),
    "attention_memory": Picture("Memory of attention", ("attention_tiles",), attention_memory),
    "tokens_per_second": Picture(
        "Text from a 4-bit model", ("decode", "generate"), tokens_per_second
    ),
    "grid_sample": Picture("Grid sampling", ("grid_sample",), grid_sample),
    "attention_decode": Picture(
        "Attention of one token over a cache", ("attention_decode",), attention_decode
    ),
    "gather_qmm": Picture("Products with experts", ("gather_qmm",), gather_qmm),
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
            for machine, results in _by_machine(folder, picture.sources).items():
                one = next(iter(results.values()))
                figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
                figure.supxlabel(one.caption, fontsize=7.5, color="#666666")
                picture.draw(figure, results)
                lines = [line for axis in figure.axes for line in axis.lines]
                if lines and all(len(line.get_xydata()) < 2 for line in lines):
                    continue  # one length makes no curve
                _legend(figure, f"{picture.title}: {one.device}")
                path = folder / "plots" / f"{name}_{machine}.png"
                path.parent.mkdir(exist_ok=True)
                figure.savefig(path, metadata={"Software": None})
                written.append(path)
    if not written:
        raise FileNotFoundError(f"{folder}: no results of benchmarks in it")
    return written


def _by_machine(folder: Path, sources: tuple[str, ...]) -> dict[str, dict[str, Results]]:
    """Results by kind of machine and benchmark."""
    by_machine: dict[str, dict[str, Results]] = {}
    for source in sources:
        for name in (source, f"{source}_cuda", f"{source}_metal"):
            if (path := folder / f"{name}.csv").exists():
                one = Results.read(path)
                by_machine.setdefault(_kind(one), {}).setdefault(source, one)
    return by_machine


def _kind(results: Results) -> str:
    backend = results.facts["backend"].partition(" ")[0]
    return backend if backend in ("cuda", "metal") else "cpu"
