"""Writes the model card of a trained model: from its training record, its files, and samples.

python models/card.py models/tales-qwen2
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from corpus import Text, read_plays, read_tales
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import get_total_parameters
from settings import Settings

HERE = Path(__file__).parent
SEED, TEMPERATURE, TOP_P, MAX_TOKENS = 0, 0.6, 0.9, 150
PROMPTS = [
    "Once upon a time there was a king who",
    "There was once a poor woodcutter who lived with his wife",
    "ROMEO:\n",
]

CARD = """\
---
language: en
license: mit
library_name: mlx
pipeline_tag: text-generation
---

# {name}

A language model of {parameters:.1f} million parameters that writes in the manner of the Grimms'
tales and of Shakespeare's plays. It is small enough to live in a repository and has the layout of a
quantized Qwen2 checkpoint of mlx-lm, so that tests, demos and benchmarks run on the real thing. Its
sentences are English; its stories go nowhere, and it knows nothing.

    python -m mlx_lm generate --model {path} --prompt "{prompt}" \\
        --seed {seed} --temp {temperature} --top-p {top_p} --max-tokens {max_tokens}

It has no chat format: in a chat it goes on with what was said to it.

## Description

| | |
|---|---|
| architecture | Qwen2: {layers} layers, width {hidden}, MLP {intermediate}, {heads} query heads, \
{kv_heads} key and value heads, {tied} embeddings |
| weights | {bits} bits in groups of {group_size}, with scales and biases in bfloat16 |
| tokenizer | byte-level BPE of {vocab} tokens, trained on the training texts alone |
| window in training | {context} tokens |
| size on disk | {megabytes:.1f} MB |

## Training data

Two texts, both in the public domain and in `models/data`; nothing else, and no other model.

| text | for training | held out |
|---|---|---|
{texts}

The first is the translation by Edgar Taylor and Marian Edwardes, as prepared by Project Gutenberg;
the second is the selection from Shakespeare known as Tiny Shakespeare. The last {held_out} tales
({titles}) and the end of the plays are held out: the
model is not trained on them, but the settings, and the step whose weights were kept ({best} of
{steps}), were chosen by them.

## How well it predicts held-out text

| text | weights | perplexity a token | bits a byte |
|---|---|---|---|
{figures}

Every token is predicted from the {half} to {context} tokens before it (fewer at the start).
Perplexity depends on how much text a token holds; bits a byte can be compared between vocabularies.

## Samples

The command above writes these texts for three prompts (in bold), on a CPU, at the first attempt:

{samples}

## How to train it again

    {command}
    python models/card.py {path}

`training.json` has all settings and the course of the run, which took {seconds:.0f} s on {device}
with MLX {mlx}. The tokenizer, the batches, the first weights and the dropped parts follow from the
texts and the seed. On a CPU, a second run gives the same weights bit for bit, interrupted or not
(tested with a small run, where one version of MLX is used throughout). That has not been tested on
a GPU: expect a model of the same quality there, not the same bits.

## Licence

The texts are in the public domain. The weights are under this repository's MIT licence.
"""


def text_row(title: str, text: Text) -> str:
    """Return a table row with the sizes of a text."""
    sizes = [f"{sum(map(len, part)):,} characters" for part in (text.train, text.valid)]
    return f"| {title} | {sizes[0]} | {sizes[1]} |"


def figure_rows(validation: dict[str, Any]) -> str:
    """Return table rows with perplexity and bits per byte of each held-out text."""
    return "\n".join(
        f"| {text} ({entry['tokens']:,} tokens) | {kind} "
        f"| {entry[kind]['perplexity']:.2f} | {entry[kind]['bits_per_byte']:.4f} |"
        for text, entry in validation.items()
        for kind in ("bfloat16", "quantized")
    )


def sample(folder: Path, prompt: str) -> str:
    """Return a prompt in bold and its continuation, as a Markdown quotation."""
    # As `mlx_lm generate` does: a model that is built draws random numbers.
    mx.random.seed(SEED)
    model, tokenizer = load(str(folder))
    sampler = make_sampler(temp=TEMPERATURE, top_p=TOP_P)
    stream = stream_generate(model, tokenizer, prompt, max_tokens=MAX_TOKENS, sampler=sampler)
    text = tokenizer.decode(tokenizer.encode(prompt) + [response.token for response in stream])
    bold = prompt.rstrip()
    lines = f"**{bold}**{text.removeprefix(bold).rstrip()} ...".split("\n")
    return "\n".join(
        f"> {line}\\" if line and after else f"> {line}".rstrip()
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
    )


def train_command(record: dict[str, Any], folder: Path) -> str:
    """Return the command that trains the model of a record again, defaults left out."""
    settings, defaults = record["settings"], Settings().to_dict()
    if record["step"] == settings["steps"]:
        settings = settings | {"minutes": 0.0}  # The time limit was not reached.
    changed = {k: v for k, v in settings.items() if v != defaults[k]}
    options = [f"--{k.replace('_', '-')} {v}" for k, v in changed.items()]
    if folder.name != "tales-qwen2":
        options.append(f"--out {folder}")
    return " ".join(["python models/train.py", *options])


def card(folder: Path) -> str:
    """Return the model card of a folder that `train.py` wrote."""
    config, record = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("config", "training")
    )
    settings = Settings(**record["settings"])
    best = min(record["history"], key=lambda row: row["score"])
    tales, plays = read_tales(), read_plays()
    path = f"models/{folder.name}"
    return CARD.format(
        name=folder.name,
        path=path,
        prompt=PROMPTS[0],
        seed=SEED,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        max_tokens=MAX_TOKENS,
        parameters=get_total_parameters(load(str(folder))[0]) / 1e6,
        layers=settings.layers,
        hidden=settings.hidden,
        intermediate=settings.intermediate,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        tied="separate" if settings.untied else "tied",
        **config["quantization"],
        vocab=config["vocab_size"],
        context=settings.context,
        half=settings.context // 2,
        megabytes=sum(f.stat().st_size for f in folder.iterdir() if f.name != "README.md") / 1e6,
        texts="\n".join([text_row("Grimms' tales", tales), text_row("Shakespeare's plays", plays)]),
        held_out=len(tales.valid),
        titles=" and ".join(tale.split("\n")[0].title() for tale in tales.valid),
        best=best["step"],
        steps=record["step"],
        figures=figure_rows(record["validation"]),
        samples="\n\n".join(sample(folder, prompt) for prompt in PROMPTS),
        command=train_command(record, folder),
        seconds=record["seconds"],
        device=record["device"],
        mlx=record["mlx"],
    )


def main() -> None:
    """Write README.md into a model's folder."""
    parser = argparse.ArgumentParser(description="Write the model card of a trained model.")
    parser.add_argument("folder", type=Path, nargs="?", default=HERE / "tales-qwen2")
    folder = parser.parse_args().folder
    # Samples by the same seed differ from device to device.
    mx.set_default_device(mx.cpu)
    (folder / "README.md").write_text(card(folder))


if __name__ == "__main__":
    main()
