"""Find the fastest launch options for a model's shapes on this machine, and remember them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .arguments import add_model, positive

if TYPE_CHECKING:
    from ..tuning.search import Trial
    from ..tuning.shapes import Found
    from ..tuning.tune import Tuned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "--model", required=False)
    parser.add_argument("--budget", type=positive, default=60, help="seconds to spend at most")
    parser.add_argument("--beam", type=positive, default=4, help="configurations to follow")
    parser.add_argument("--prompt-tokens", type=positive, default=512, help="of the traced prefill")
    parser.add_argument("--batch", type=positive, default=1, help="prompts decoded side by side")
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="compute costs for this GPU from what the host backend counts, such as applegpu_g13s",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--list", action="store_true", help="print what is stored")
    group.add_argument("--clear", action="store_true", help="delete what is stored")


def run(args: argparse.Namespace) -> None:
    from ..tuning import store

    if args.list:
        _list()
    elif args.clear:
        print(f"{store.clear()} results deleted")
    else:
        _tune(args)


def _list() -> None:
    from ..tuning import store
    from .demo import table

    for device, entries in store.listed().items():
        rows = [
            (key, e.path, _fields(e.config), f"{e.heuristic / e.seconds:.2f}x", str(e.tried))
            for key, e in entries.items()
        ]
        print(device)
        print(table(("kernel, shape", "path", "found", "gain", "tried"), rows), end="\n\n")


def _tune(args: argparse.Namespace) -> None:
    import time

    from tqdm import tqdm

    from ..tuning.tune import tune

    problems = _problems(args)
    deadline = time.monotonic() + args.budget
    done: list[tuple[Found, Tuned[Any]]] = []
    bar = tqdm(total=args.budget, unit="s", disable=None, bar_format="{l_bar}{bar}| {postfix}")
    try:
        for i, (family, problem, count) in enumerate(problems):
            share = (deadline - time.monotonic()) / (len(problems) - i)
            if share <= 0:
                break
            best: dict[str, float] = {}

            def show(
                trial: Trial[Any], best: dict[str, float] = best, key: str = family.key(problem)
            ) -> None:
                best["first"] = best.get("first", trial.seconds)
                best["now"] = min(best.get("now", trial.seconds), trial.seconds)
                bar.n = min(args.budget, args.budget - (deadline - time.monotonic()))
                bar.set_postfix_str(f"{key}: {best['first'] / best['now']:.2f}x")

            tuned = tune(
                family,
                problem,
                beam=args.beam,
                budget_s=share,
                machine=args.machine,
                progress=show,
            )
            done.append(((family, problem, count), tuned))
    except KeyboardInterrupt:
        print("interrupted; what was found is kept", file=sys.stderr)
    finally:
        bar.close()
    _report(done)


def _problems(args: argparse.Namespace) -> list[Found]:
    from ..convert import convert_model
    from ..loading import load_stock
    from ..tuning.shapes import problems_of_model
    from .demo import shipped_model

    path = args.model or shipped_model()
    loaded = load_stock(path, trust_remote_code=args.trust_remote_code)
    convert_model(loaded.model, config=loaded.quantization)
    return problems_of_model(loaded.model, prompt=args.prompt_tokens, batches=(args.batch,))


def _report(done: list[tuple[Found, Tuned[Any]]]) -> None:
    from dataclasses import asdict

    from .demo import table

    rows = [
        (
            family.key(problem),
            str(count),
            f"{tuned.heuristic * 1e6:.1f} us",
            f"{tuned.seconds * 1e6:.1f} us",
            f"{tuned.gain:.2f}x",
            tuned.path if tuned.path != "kernel" else _fields(asdict(tuned.config)),
            str(len(tuned.trials)),
        )
        for (family, problem, count), tuned in done
    ]
    header = ("kernel, shape", "launches", "heuristic", "found", "gain", "configuration", "tried")
    print(table(header, rows))


def _fields(config: Any) -> str:
    return " ".join(f"{name}={int(value)}" for name, value in config.items())
