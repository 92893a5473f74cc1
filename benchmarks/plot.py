"""Draws the pictures of docs/benchmarks.md from the files that the benchmarks write.

    mlx-qlayers bench --from benchmarks/results

A folder holds a run of one machine (``decode.csv``), or several with the machine's kind at the end
of the name (``decode_cuda.csv``; without one it is a CPU's). Pictures go to its folder ``plots``.
They are made to be read at 400 pixels, two of them beside each other on a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stored import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that readers with colour blindness can tell apart (Okabe and Ito).
GREY, BLUE, ORANGE, GREEN = "#888888", "#0072B2", "#E69F00", "#009E73"
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
# Numbers by what they are of: points of a curve by its label, or bars of a group.
Numbers = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Picture:
    """A picture, and the benchmarks whose results it may show."""

    title: str
    sources: tuple[str, ...]
    draw: Callable[[Figure, dict[str, Results]], None]


def quantized_matmul_rows(figure: Figure, results: dict[str, Results]) -> None:
    """Weights read a second against the rows of x: where it falls, arithmetic is the limit."""
    # The first projection of Qwen2-7B's feed-forward layers; a CPU measures every number of rows
    # with a smaller matrix.
    shape = "1024 x 1024" if "quantized_matmul" in results else "37888 x 3584"
    n, k = (int(part) for part in shape.split(" x "))
    gigabytes = n * k * (4 + 32 / 64) / 8 / 1e9
    labels = {"stock": "stock", "dense": "dequantized, dense", "reference": "ours, MLX operators"}
    lines: Numbers = {label: {} for label in (*labels.values(), "ours")}
    for row in (row for one in results.values() for row in one.rows):
        alike = row.get("dtype", "bfloat16") == "bfloat16"
        alike &= row.get("format", "affine 4") == "affine 4"
        if alike and row.get("shape", row.get("product")) == shape:
            for column, label in (labels | {"kernel": "ours", "ours": "ours"}).items():
                if isinstance(time := row.get(column), float):
                    lines[label][row["rows"]] = gigabytes / time * 1e3
    axis = _curves(figure, lines)
    axis.set(xlabel=f"rows of x (matrix {shape})", ylabel="packed weights read, GB/s")


def attention_memory(figure: Figure, results: dict[str, Results]) -> None:
    """Peak memory of training attention against the length."""
    lines: Numbers = {"plain operators": {}, "stock": {}, "ours": {}}
    paths = dict(zip(("unfused", "stock", "kernel"), lines, strict=True))
    for row in results["attention_tiles"].rows:
        shape, _, length = row["task"].partition(" L=")
        length, _, kind = length.partition(" ")
        alike = shape == "32/8 D=128" and kind == "bfloat16, with gradients"
        if alike and row["path"] in paths:
            lines[paths[row["path"]]][int(length)] = row["MB"]
    axis = _curves(figure, lines, thousands=True)
    axis.set(
        xlabel="tokens (32 query and 8 key heads of 128, causal)",
        ylabel="forward and backward, MB",
    )


def attention_decode(figure: Figure, results: dict[str, Results]) -> None:
    """Microseconds of one query over a cache, against the keys in it."""
    rows = [row for row in results["attention_decode"].rows if row["q"] == "bfloat16"]
    rows = [row for row in rows if row["calls"] == "compiled"] or rows
    axis = _curves(figure, _pairs(rows, "{cache}", "keys", "stock us", "auto us"), thousands=True)
    axis.set(xlabel="keys in the cache", ylabel="microseconds a layer")


def gather_qmm(figure: Figure, results: dict[str, Results]) -> None:
    """Milliseconds of the experts' first projection against the tokens."""
    rows = [row for row in results["gather_qmm"].rows if row.get("product") == "forward"]
    axis = _curves(figure, _pairs(rows, "{model}", "tokens", "stock", "kernel"))
    axis.set(xlabel="tokens", ylabel="milliseconds")


def tokens_per_second(figure: Figure, results: dict[str, Results]) -> None:
    """Decoding and prefill of a model, stock and converted."""
    if "decode" in results:
        groups = _by(results["decode"].rows, "{what}", "layers", "tokens/s")
    else:
        rows = results["generate"].rows
        groups = _by(rows, "decode {model}", "layers", "decode tok/s")
        groups |= _by(rows, "prefill {model}", "layers", "prefill tok/s")
    names = {"stock": "stock mlx-lm", "stock mlx-lm": "stock mlx-lm"}
    names |= {"converted": "converted", "converted (auto)": "converted"}
    plots: dict[str, Numbers] = {"decode": {}, "prefill": {}}
    for what, group in groups.items():
        which, _, size = what.partition(" ")
        if which.rstrip(",") in plots:
            shown = {names[who]: speed for who, speed in group.items() if who in names}
            plots[which.rstrip(",")][size] = shown
    grid = figure.add_gridspec(1, 2, width_ratios=[max(1, len(p)) for p in plots.values()])
    for cell, (what, sizes) in zip(grid, plots.items(), strict=True):
        axis = figure.add_subplot(cell)
        _bars(axis, sizes)
        axis.set_title(what)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.margins(y=0.1)
        if any(name.isdigit() for name in sizes):
            axis.set_xlabel("prompt, tokens")
    figure.axes[0].set_ylabel("tokens a second")


def grid_sample(figure: Figure, results: dict[str, Results]) -> None:
    """Milliseconds of every task by every path, those of one task beside each other."""
    names = {"operators": "plain MLX operators", "reference": "ours, MLX operators"}
    groups = _by(results["grid_sample"].rows, "{task}", "path", "ms")
    named = {
        task.replace(" ", "\n", 1): {names.get(path, "ours"): ms for path, ms in times.items()}
        for task, times in groups.items()
    }
    axis = figure.subplots()
    _bars(axis, named, across=True)
    axis.tick_params("y", labelsize=7)
    axis.set(xscale="log", xlabel="milliseconds")
    axis.invert_yaxis()
    axis.margins(x=0.2)
    _plain(axis, "x")


def _by(rows: Iterable[Row], label: str, x: str, y: str) -> Numbers:
    """A curve or a group for each label; what was not measured has no number."""
    found: Numbers = {}
    for row in rows:
        group = found.setdefault(label.format_map(row), {})
        if row.get(y):
            group[row[x]] = row[y]
    return found


def _pairs(rows: list[Row], kind: str, x: str, stock: str, ours: str) -> Numbers:
    """Two curves for each kind."""
    both = {"stock": _by(rows, kind, x, stock), "ours": _by(rows, kind, x, ours)}
    return {f"{who}, {each}": both[who][each] for each in both["ours"] for who in both}


def _curves(figure: Figure, lines: Numbers, *, thousands: bool = False) -> Axes:
    """Curves of ``"stock"``, ``"ours"`` and others on logarithmic axes; empty ones are left out.

    Where both stand beside their kinds (``"stock, 8 bits"``), each kind has a colour.
    """
    axis, points = figure.subplots(), {k: v for k, v in lines.items() if v}
    kinds = [label.removeprefix("ours, ") for label in lines if label.startswith("ours, ")]
    colours = dict(zip(kinds, (BLUE, ORANGE, GREEN), strict=False))
    for label, numbers in points.items():
        who, _, kind = label.partition(", ")
        if f"stock, {kind}" in lines:
            style, colour = {"stock": "--s", "ours": "-o"}[who], colours[kind]
        else:
            style, colour = {"stock": ("--s", GREY), "ours": ("-o", BLUE)}.get(
                label, (":^", ORANGE)
            )
        axis.plot(*zip(*sorted(numbers.items()), strict=True), style, color=colour, label=label)
    axis.set(xscale="log", yscale="log")
    # Ticks where powers of two were measured.
    measured = sorted({int(x) for numbers in points.values() for x in numbers})
    shown = [x for x in measured if x > 0 and not x & x - 1]
    labels = [f"{x / 1024:g}k" if thousands and x >= 1024 else f"{x:g}" for x in shown]
    axis.set_xticks(shown, labels)
    axis.minorticks_off()
    _plain(axis, "y")
    return axis


def _plain(axis: Axes, which: str) -> None:
    """Numbers written out along a logarithmic axis, and enough of them."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = getattr(axis, f"get_{which}lim")()
    of = getattr(axis, f"{which}axis")
    of.set_major_locator(LogLocator(subs=(1,) if high / low > 80 else (1, 2, 5), numticks=20))
    of.set_minor_locator(NullLocator())
    of.set_major_formatter("{x:,.10g}")


def _bars(axis: Axes, groups: Mapping[str, Mapping[str, float]], across: bool = False) -> None:
    """Bars beside each other, or below, their values written on them."""
    found = dict.fromkeys(name for group in groups.values() for name in group)
    names = sorted(found, key=lambda name: not name.startswith(("stock", "plain")))
    width, middle = 0.84 / max(1, len(names)), (len(names) - 1) / 2
    draw, ticks = (axis.barh, axis.set_yticks) if across else (axis.bar, axis.set_xticks)
    for i, name in enumerate(names):
        colour = {"plain MLX operators": GREY, "stock mlx-lm": GREY}.get(name, BLUE)
        colour = ORANGE if name == "ours, MLX operators" else colour
        places = [g + (i - middle) * width for g in range(len(groups))]
        values = [group.get(name, float("nan")) for group in groups.values()]
        bars = draw(places, values, width * 0.92, color=colour, label=name)
        axis.bar_label(bars, [_short(value) for value in values], fontsize=8, padding=1)
    ticks(range(len(groups)), list(groups))
    axis.grid(visible=False, axis="y" if across else "x")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value > 0 else ""


PICTURES = {
    "tokens_per_second": Picture(
        "Text from a 4-bit model", ("decode", "generate"), tokens_per_second
    ),
    "quantized_matmul_rows": Picture(
        "Quantized products, bfloat16, 4 bits",
        ("quantized_few", "quantized_many", "quantized_matmul"),
        quantized_matmul_rows,
    ),
    "gather_qmm": Picture("Products with experts", ("gather_qmm",), gather_qmm),
    "attention_memory": Picture("Memory of attention", ("attention_tiles",), attention_memory),
    "attention_decode": Picture(
        "Attention of one token over a cache", ("attention_decode",), attention_decode
    ),
    "grid_sample": Picture("Grid sampling", ("grid_sample",), grid_sample),
}


def draw(folder: Path) -> list[Path]:
    """Draw every picture for which there are results in a folder; the files written.

    Raises:
        FileNotFoundError: there are no results at all.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not any(folder.glob("*.csv")):
        raise FileNotFoundError(f"{folder}: no results of benchmarks in it")
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
                # One for the whole picture, above it; pairs below each other.
                handles, labels = figure.axes[0].get_legend_handles_labels()
                columns = len(labels) // 2 if len(labels) > 3 else len(labels)
                given = {"loc": "outside upper center", "ncols": columns, "title_fontsize": 10.5}
                given |= {"title": f"{picture.title}: {one.device}", "columnspacing": 1.2}
                figure.legend(handles, labels, handlelength=1.6, **given)
                path = folder / "plots" / f"{name}_{machine}.png"
                path.parent.mkdir(exist_ok=True)
                figure.savefig(path, metadata={"Software": None})
                written.append(path)
    return written


def _by_machine(folder: Path, sources: tuple[str, ...]) -> dict[str, dict[str, Results]]:
    """Results by kind of machine and benchmark."""
    by_machine: dict[str, dict[str, Results]] = {}
    for source in sources:
        for kind in ("cpu", "cuda", "metal"):
            stem = source if kind == "cpu" else f"{source}_{kind}"
            if (path := folder / f"{stem}.csv").exists():
                one = Results.read(path)
                backend = one.facts["backend"].partition(" ")[0]
                machine = backend if backend in ("cuda", "metal") else "cpu"
                by_machine.setdefault(machine, {}).setdefault(source, one)
    return by_machine
