"""Every choice of a training run, as one frozen dataclass that doubles as the command line."""

import argparse
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import mlx.core as mx


def option(default: Any, text: str) -> Any:
    """Declare a field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """The settings that determine a trained model, besides the texts."""

    seed: int = option(0, "seed of everything random")
    vocab: int = option(4096, "tokens, the end-of-text token included")
    hidden: int = option(384, "width of the residual stream")
    layers: int = option(6, "transformer blocks")
    intermediate: int = option(1024, "width of the MLP")
    heads: int = option(6, "query heads")
    kv_heads: int = option(2, "key and value heads")
    untied: int = option(0, "1: a separate output matrix")
    context: int = option(512, "tokens of a training window")
    batch: int = option(16, "windows of a step")
    steps: int = option(1500, "training steps")
    lr: float = option(1e-3, "peak learning rate")
    min_lr: float = option(0.05, "last learning rate, as a fraction of the peak")
    warmup: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.3, "decoupled weight decay of the matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    dropout: float = option(0.2, "dropout of embeddings and residual branches")
    token_dropout: float = option(0.0, "dropout of whole input tokens")
    bpe_dropout: float = option(0.1, "dropped merges in the varied segmentations")
    copies: int = option(16, "varied segmentations of the texts")
    augment: float = option(0.5, "probability of a varied segmentation, before quantized training")
    tales_weight: float = option(0.6, "probability that a window comes from the tales")
    ema: float = option(0.998, "decay of the averaged weights, which are the ones that ship")
    qat: float = option(0.2, "last fraction of training, run with weights rounded to 4 bits")
    dtype: str = option("auto", "float32 or bfloat16; auto: bfloat16 on a GPU")
    limit_bytes: int = option(0, "use only the first bytes of each text; 0: all")
    eval_every: int = option(75, "steps between validations")
    patience: int = option(0, "stop after this many validations without a gain; 0: never")
    minutes: float = option(0.0, "compress the schedule to end in this time; 0: no limit")

    @property
    def compute_dtype(self) -> mx.Dtype:
        """The type that the network computes in while it is trained."""
        if self.dtype == "auto":
            gpu = mx.default_device() == mx.Device(mx.gpu)
            return mx.bfloat16 if gpu else mx.float32
        return getattr(mx, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


# Small enough for a CPU to finish in well under a minute; it exercises everything but quality.
SMOKE = Settings(
    vocab=384,
    hidden=64,
    layers=2,
    intermediate=128,
    heads=2,
    kv_heads=1,
    context=32,
    batch=4,
    steps=40,
    warmup=5,
    copies=2,
    limit_bytes=40_000,
    eval_every=20,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one option for every field; those not given stay out of the namespace."""
    for f in fields(Settings):
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            type=type(f.default),
            default=argparse.SUPPRESS,
            metavar=type(f.default).__name__.upper(),
            help=f"{f.metadata['help']} (default: {f.default})",
        )


def from_options(options: argparse.Namespace, base: Settings) -> Settings:
    """Return `base` with what was given on the command line."""
    given = {f.name: getattr(options, f.name) for f in fields(Settings) if hasattr(options, f.name)}
    return replace(base, **given)
