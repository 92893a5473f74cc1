"""Find the fastest launch options for a model's shapes on this machine, and remember them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from .arguments import add_model

if TYPE_CHECKING:
    from ..metal.record import Record
    from ..tuning.tune import Tuned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model", required=False)
    parser.add_argument("--budget", type=int, default=60, help="seconds to spend at most")
    parser.add_argument("--beam", type=int, default=4, help="configurations to follow")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the prefill")
    parser.add_argument("--batch", type=int, default=1, help="sequences side by side")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--list", action="store_true", help="print what is stored")
    group.add_argument("--clear", action="store_true", help="delete what is stored")


def run(args: argparse.Namespace) -> None:
    from ..measurements import store

    if args.list:
        _list()
    elif args.clear:
        print(f"{store.clear()} results deleted")
    else:
        _tune(args)


def _list() -> None:
    from ..measurements import store
    from ..runtime.explain import aligned

    stored = store.listed()
    for device, entries in stored.items():
        rows = [
            (key, e.path, _fields(e.config), f"{e.heuristic / e.seconds:.2f}x", str(e.tried))
            for key, e in entries.items()
        ]
        print(device)
        header = "kernel, shape", "path", "found", "gain", "tried"
        print("\n".join(aligned([header, *rows], numbers=True)), end="\n\n")
    if not stored:
        print("nothing was tuned on this machine")


def _tune(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from ..tuning.evaluator import IN_ORDER
    from ..tuning.tune import DeviceLost, tune_all

    os.environ.update(IN_ORDER)  # read by MLX when it first uses a GPU
    lost: DeviceLost | None = None
    done: list[Tuned[Any]] = []
    records = _records(args)
    start, best, layout = time.monotonic(), 1.0, "{l_bar}{bar}| {n:.0f}/{total:.0f} s {postfix}"
    with tqdm(total=args.budget, disable=None, bar_format=layout) as bar:

        def show(record: Record, gain: float) -> None:
            """The seconds that are spent, the gain of a problem so far, and the best of all."""
            nonlocal best
            best, bar.n = max(best, gain), min(args.budget, time.monotonic() - start)
            bar.set_postfix_str(f"{record.key}: {gain:.2f}x, best {best:.2f}x")

        try:
            found = tune_all(records, beam=args.beam, budget_s=args.budget, progress=show)
            for each in found:
                done.append(each)  # what comes before an interrupt counts
        except KeyboardInterrupt:
            print("interrupted; what was found is kept", file=sys.stderr)
        except DeviceLost as error:
            lost = error
    if done:
        _report(done)
    if len(done) < len(records):
        print(f"{len(records) - len(done)} of {len(records)} were not tuned", file=sys.stderr)
    if lost is not None:
        print(f"mlx-qlayers: {lost}; what was found is kept", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # a normal end would wait for the kernel that hangs


def _records(args: argparse.Namespace) -> list[Record]:
    from ..conversion.loading import load_stock
    from ..convert import convert_model
    from ..tuning.model_records import records_of_model
    from .demo import shipped_model

    path = args.model or shipped_model()
    loaded = load_stock(path, trust_remote_code=args.trust_remote_code)
    convert_model(loaded.model, config=loaded.quantization, calibrate=False)
    return records_of_model(loaded.model, prompt=args.prompt_tokens, batch=args.batch)


def _report(done: list[Tuned[Any]]) -> None:
    from dataclasses import asdict

    from ..runtime.explain import aligned

    rows = [
        (
            tuned.record.family,
            tuned.record.key.removeprefix(f"{tuned.record.family} "),
            f"{tuned.heuristic * 1e6:.1f} us",
            f"{tuned.seconds * 1e6:.1f} us",
            f"{tuned.gain:.2f}x",
            str(len(tuned.trials)),
            tuned.path,
            _fields(asdict(tuned.config)),
        )
        for tuned in done
    ]
    header = ("kernel", "shape", "heuristic", "found", "gain", "tried", "path", "configuration")
    print(*aligned([header, *rows], numbers=True), sep="\n")


def _fields(config: Any) -> str:
    """The fields of a configuration; what is true counts as 1."""
    shown = {n: int(v) if isinstance(v, bool) else v for n, v in config.items()}
    return " ".join(f"{name}={value}" for name, value in shown.items())
