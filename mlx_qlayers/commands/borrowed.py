"""Commands of mlx-lm, run as they are, with every model that they load converted."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from ..conversion.checkpoint import read_header
from . import guesses, kv_cache
from .arguments import Parser, add_layers, positive

# The work of each command, as of mlx_lm's of the same name.
SUMMARIES = {
    "chat": "Chat with a model in the terminal with the converted layers, as mlx_lm.chat does.",
    "server": "Serve a model over HTTP with the converted layers, as mlx_lm.server does.",
    "lora": "Fine-tune a model with the converted layers, as mlx_lm.lora does.",
    "fuse": "Merge adapters that lora has trained into their model, as mlx_lm.fuse does.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this package's arguments. All others are mlx-lm's, and so is the rest of the help."""
    parser.add_argument("-h", "--help", action=_Help, help="print this, and mlx-lm's help")
    add_layers(parser)
    if parser.prog.endswith(" lora"):
        text = "compute all logits for the loss, as mlx-lm does"
        parser.add_argument("--stock-loss", action="store_true", help=text)
        text = "train nothing: print what memory it would take"
        parser.add_argument("--plan", action="store_true", help=text)
        text = "bits of each of the two numbers that Adam and AdamW keep for a parameter"
        parser.add_argument("--optimizer-bits", type=int, default=32, help=text)
        text = "for --plan, instead of this device's"
        parser.add_argument("--memory", type=positive, metavar="GB", help=text)
    if parser.prog.endswith(" server"):
        text = "refuse prompts of so many tokens, and end texts there; else as long as they get"
        parser.add_argument("--context", type=positive, metavar="TOKENS", help=text)
    guesses.add_arguments(parser)
    kv_cache.add_arguments(parser)
    parser.set_defaults(rest=())


def run(args: argparse.Namespace) -> None:
    """Run mlx-lm's command of that name with ``args.rest`` as its command line."""
    run_main(args, args.rest)


def run_main(args: argparse.Namespace, command_line: Sequence[str], **replaced: Any) -> None:
    """Run mlx-lm's command ``args.command`` with its arguments.

    ``replaced`` are names of its module, and what they mean meanwhile.
    """
    module = import_module(f"mlx_lm.{args.command}")

    import mlx.core as mx

    from ..runtime.backend import default_backend
    from .ranks import ending_on_all_ranks

    one_line = SimpleNamespace(**vars(argparse) | {"ArgumentParser": Parser})
    group = mx.distributed.init()
    # Ranks that train have the whole model each.
    parallel = args.parallel if args.command == "generate" else "data"
    replaced = {"load": _loading(args, group, parallel), "argparse": one_line} | replaced
    if hasattr(module, "sharded_load"):
        replaced["sharded_load"] = _loading_shares(args)
    # mlx-lm's server generates in a thread of its own.
    backend = default_backend(args.backend) if args.backend else nullcontext()
    surroundings = _SURROUNDINGS.get(args.command, lambda *_: nullcontext())
    argv = [f"mlx-qlayers {args.command}", *command_line, *kv_cache.command_line(args)]
    if guesses.are_wanted(args, command_line):
        if group.size() > 1:
            raise ValueError("guesses need one process: ranks would choose other numbers of them")
        argv += guesses.most(command_line) if args.command != "chat" else []
        replaced |= guesses.replaced(args, replaced)
    with (
        ending_on_all_ranks(group),
        _holding(sys, argv=argv),
        _holding(module, **replaced),
        backend,
        surroundings(module, args),
        kv_cache.quantizing(args, _holding),
    ):
        module.main()


class _Help(argparse.Action):
    """Prints the help of a command, then that of mlx-lm's, whatever arguments are missing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.print_help()
        print()
        with _holding(sys, argv=[parser.prog, "--help"]):
            import_module(f"mlx_lm.{parser.prog.rpartition(' ')[2]}").main()


def _loading(args: argparse.Namespace, group: Any, parallel: str) -> Callable[..., Any]:
    """``mlx_lm.load``, which checks the files first, reads GGUF too, and converts the model."""
    from ..conversion.loading import load_stock

    def load(*inputs: Any, return_config: bool = False, **options: Any) -> tuple[Any, ...]:
        loaded = load_stock(*inputs, **options, group=group, parallel=parallel)
        _convert(args, loaded.model, loaded.quantization)
        return loaded[:3] if return_config else loaded[:2]

    return load


def _loading_shares(args: argparse.Namespace) -> Callable[..., Any]:
    """``mlx_lm.utils.sharded_load``, by which mlx-lm's commands load where there are ranks."""

    def load(name: str, pipeline_group: Any, tensor_group: Any, **options: Any) -> Any:
        parallel = args.parallel if pipeline_group is None else "pipeline"
        return _loading(args, pipeline_group or tensor_group, parallel)(name, **options)

    return load


def _convert(args: argparse.Namespace, model: Any, config: Any = None) -> None:
    """Convert a model as the arguments say, and say what was done in a line or in full."""
    from ..convert import convert_model

    if args.stock or args.command == "fuse":  # which computes nothing
        return
    # mlx-lm serves and trains models without quantized layers too.
    linear = args.command == "generate" or any("scales" in child for child in model.modules())
    report = convert_model(
        model,
        config=config,
        linear=linear,
        fuse=not args.no_fuse,
        activations=args.activations,
        calibrate=not args.no_calibrate,
        batch_invariant=args.batch_invariant,
    )
    if args.report or args.command != "generate":
        print(report.summary() if args.report else report.brief(), file=sys.stderr)


def _generate(module: Any, args: Any) -> AbstractContextManager[None]:
    theirs = module.load_prompt_cache

    def load_prompt_cache(name: str, **options: Any) -> Any:
        read_header(Path(name))
        try:
            caches, facts = theirs(name, **options)
            sound = caches and isinstance(facts["model"], str)
            if sound and isinstance(json.loads(facts["tokenizer_config"]), dict):
                return caches, facts
        except Exception as error:  # of classes that the file names, too
            raise ValueError(f"{name}: no prompt cache: {type(error).__name__}: {error}") from error
        raise ValueError(f"{name}: no prompt cache: it names no model or no tokenizer")

    return _holding(module, load_prompt_cache=load_prompt_cache)


@contextmanager
def _lora(module: Any, asked: Any) -> Iterator[None]:
    import mlx.core as mx
    from mlx_lm.tuner.trainer import iterate_batches

    from ..runtime.devices import device_of
    from ..runtime.transformed import uncompiled
    from ..training.optimizers import in_8_bits
    from ..training.plan import in_least_memory
    from ..training.recompute import recompute_activations
    from .lora_arguments import check_lora, plan_of, read_yaml

    theirs, begin, measure = module.run, module.train, module.evaluate
    if mx.cuda.is_available():  # as on a Mac: up to ten graphs of 1,000 MB are under way else
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "50")

    def run(args: Any) -> None:
        check_lora(module, args)
        if asked.optimizer_bits == 8 and args.optimizer.lower() not in ("adam", "adamw"):
            raise ValueError(f"--optimizer-bits 8: for adam or adamw, not {args.optimizer}")
        if not asked.plan:
            theirs(args)
        else:
            with TemporaryDirectory() as args.adapter_path:
                theirs(args)

    def train(model: Any, args: Any, optimizer: Any, train_dataset: Any, **options: Any) -> None:
        if not asked.stock:
            recompute_activations(model, layers=args.grad_checkpoint)
            args.grad_checkpoint = False
        optimizer = in_8_bits(optimizer) if asked.optimizer_bits == 8 else optimizer
        given = _losses(model, asked)
        if asked.plan:
            print(plan_of(model, optimizer, train_dataset, args, asked.memory, **given))
            return
        given |= {"model": model, "args": args, "optimizer": optimizer}
        # Kernels on a CPU compute at once.
        if not device_of().launches_at_once and not asked.stock:
            given["iterate_batches"] = in_least_memory(iterate_batches)
        begin(train_dataset=train_dataset, **given, **options)

    def evaluate(model: Any, **options: Any) -> Any:
        return measure(model=model, **_losses(model, asked), **options)

    replaced: dict[str, Any] = {"run": run, "train": train, "evaluate": evaluate}
    replaced["yaml"] = SimpleNamespace(load=read_yaml)
    # A compiled step traces its operations, and traced ones run no kernels on a CPU. Freed memory
    # is allocated again as soon there.
    on_cpu = device_of().launches_at_once
    before = mx.set_cache_limit(0) if on_cpu else None
    try:
        with _holding(module, **replaced), uncompiled(on_cpu):
            yield
    finally:
        if before is not None:
            mx.set_cache_limit(before)


def _losses(model: Any, asked: Any) -> dict[str, Any]:
    from ..training.fused_loss import fused_loss

    if asked.stock_loss or asked.stock:
        return {}
    loss = fused_loss(model)
    print(loss, file=sys.stderr)
    return {"loss": loss}


def _server(module: Any, args: Any) -> AbstractContextManager[None]:
    from . import prompt_parts, serving

    class Generator(serving.ResponseGenerator):
        singly, context = args.heads is not None, args.context
        guesses = guesses.are_wanted(args, args.rest)

        def __init__(self, provider: Any, *others: Any) -> None:
            providers.append(provider)
            super().__init__(provider, *others)

    providers: list[Any] = []
    sources = partial(guesses.of_batches, args, providers) if Generator.guesses else None
    return _holding(
        module,
        BatchGenerator=partial(prompt_parts.BatchGenerator, guesses=sources),
        LRUPromptCache=serving.PromptCache,
        ModelProvider=serving.ModelProvider,
        Queue=serving.Answers,
        ResponseGenerator=Generator,
        _make_sampler=serving.make_sampler,
        _run_http_server=serving.serve,
    )


_SURROUNDINGS: dict[str, Callable[[Any, Any], AbstractContextManager[None]]] = {
    "generate": _generate,
    "chat": lambda *_: suppress(EOFError),  # Ctrl-D leaves a chat as its command q does
    "lora": _lora,
    "server": _server,
}


@contextmanager
def _holding(owner: Any, **values: Any) -> Iterator[None]:
    """Let a module hold other values for as long as this lasts."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
