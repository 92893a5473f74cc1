"""The training script: data, simulated quantization, and runs that are killed and started again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import dequantize_model
from numerics import QUANTIZED, TRAINING, assert_same_sums
from transformers import AutoTokenizer

MODELS = Path(__file__).parents[2] / "models"
sys.path.insert(0, str(MODELS))

import checkpoint  # noqa: E402
from corpus import (  # noqa: E402
    END,
    Sampler,
    encode,
    encode_copies,
    read_plays,
    read_tales,
    train_tokenizer,
    windows,
)
from evaluate import total_loss  # noqa: E402
from network import fake_quantize  # noqa: E402
from settings import SMOKE  # noqa: E402
from train import Trainer  # noqa: E402

SETTINGS = replace(SMOKE, steps=12, eval_every=8, limit_bytes=10_000)
# On a CPU runs repeat bit for bit; elsewhere sums may be rounded in another order.
TOLERANCE = 0.0 if mx.default_device() == mx.Device(mx.cpu) else TRAINING


def command(folder: Path, *options: str) -> list[str]:
    script = [sys.executable, str(MODELS / "train.py"), "--smoke", "--out", str(folder / "model")]
    steps = ["--steps", str(SETTINGS.steps), "--eval-every", str(SETTINGS.eval_every)]
    size = ["--limit-bytes", str(SETTINGS.limit_bytes)]
    return [*script, "--checkpoints", str(folder / "checkpoints"), *steps, *size, *options]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a smoke run in it that was killed half-way and then finished."""
    folder = tmp_path_factory.mktemp("killed")
    path = folder / "checkpoints" / "checkpoint.safetensors"
    run = subprocess.Popen(command(folder, "--checkpoint-every", "3"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not path.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL and not (folder / "model").exists()
    done = subprocess.run(command(folder), capture_output=True, text=True, check=True)
    assert "resuming at step " in done.stdout
    assert "it/s" not in done.stderr and "step/s" not in done.stderr, "a progress bar in a pipe"
    return folder


class Recording(Trainer):
    """A run that keeps every checkpoint, under its step."""

    def save(self) -> None:
        super().save()
        shutil.copy(self.path, self.path.with_name(f"{self.progress['step']}.safetensors"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of an uninterrupted run, half-way and at its end."""
    folder = tmp_path_factory.mktemp("whole")
    Recording(SETTINGS, folder).train(checkpoint_every=6)
    return folder


def largest_difference(path: Path, other: Path) -> float:
    """Return how far the parameters of two checkpoints are apart."""
    got, expected = (checkpoint.load(p)[0]["params"] for p in (path, other))
    gaps = tree_map(lambda a, b: mx.abs(a - b).max(), expected, got)
    return max(gap.item() for _, gap in tree_flatten(gaps))


def resumed_difference(whole: Path, folder: Path, **changed: Any) -> float:
    """Resume half-way from a checkpoint with changed parts; compare the end with the real one."""
    arrays, progress = checkpoint.load(whole / "6.safetensors")
    parts = {"arrays": arrays, "progress": progress}
    for part, change in changed.items():
        parts[part] = parts[part] | change
    path = folder / "checkpoint.safetensors"
    checkpoint.save(path, parts["arrays"], parts["progress"])
    trainer = Trainer(SETTINGS, folder)
    assert trainer.resume()
    trainer.train(checkpoint_every=100)
    return largest_difference(path, whole / "12.safetensors")


def test_killed_run_ends_like_an_uninterrupted_one(smoke: Path, whole: Path) -> None:
    gap = largest_difference(
        smoke / "checkpoints" / "checkpoint.safetensors", whole / "12.safetensors"
    )
    assert gap <= TOLERANCE
    rows = json.loads((smoke / "model" / "training.json").read_text())["history"]
    _, progress = checkpoint.load(whole / "12.safetensors")
    assert [row["step"] for row in rows] == [8, 12]
    for row, other in zip(rows, progress["history"], strict=True):
        assert row == pytest.approx(other, abs=TRAINING)


def test_resuming_is_exact_only_with_the_whole_state(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resumed_difference(whole, tmp_path) <= TOLERANCE

    # All that a checkpoint could get wrong is seen: step, moments, random state.
    arrays, progress = checkpoint.load(whole / "6.safetensors")
    behind = resumed_difference(whole, tmp_path, progress={"step": progress["step"] - 1})
    fresh = tree_map(lambda a: mx.zeros_like(a) if a.ndim else a, arrays["optimizer"])
    forgetful = resumed_difference(whole, tmp_path, arrays={"optimizer": fresh})
    seed = mx.random.seed
    monkeypatch.setattr(mx.random, "seed", lambda value: seed(value + 1))
    other_dropout = resumed_difference(whole, tmp_path)
    assert min(behind, forgetful, other_dropout) > 10 * TRAINING


def test_checkpoint_of_other_settings_is_refused(whole: Path) -> None:
    with pytest.raises(SystemExit, match="belongs to a run with other settings"):
        Trainer(replace(SETTINGS, seed=SETTINGS.seed + 1), whole).resume()


def test_directory_loads_in_mlx_lm_and_transformers(smoke: Path) -> None:
    folder = smoke / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == {"group_size": 64, "bits": 4}
    weights = mx.load(str(folder / "model.safetensors"))
    kinds = {name.rsplit(".", 1)[1]: w.dtype for name, w in weights.items() if "_proj" in name}
    assert kinds["weight"] == mx.uint32 and kinds["scales"] == kinds["biases"] == mx.bfloat16
    assert {w.dtype for w in weights.values()} == {mx.uint32, mx.bfloat16}
    model, tokenizer = mlx_lm.load(str(folder))
    assert mlx_lm.generate(model, tokenizer, prompt="The king", max_tokens=4)
    assert tokenizer.eos_token == END and len(tokenizer.vocab) == config["vocab_size"]

    fast = AutoTokenizer.from_pretrained(folder)
    rng = np.random.default_rng(3)
    awkward = "".join(chr(c) for c in rng.integers(1, 0xD800, 200))
    awkward += "e\u0301 \t\r\n\n  x\u0000 \U0001f98a"
    for text in (awkward, "", " ", "Once upon a time,\n\n'Who's there?' said he.\n"):
        normal = unicodedata.normalize("NFC", text)
        assert fast.decode(fast.encode(text)) == normal
        assert tokenizer.decode(tokenizer.encode(text)) == normal


def test_training_lowered_the_loss_and_quantization_keeps_it(smoke: Path) -> None:
    record = json.loads((smoke / "model" / "training.json").read_text())
    uniform = record["settings"]["vocab"]
    for text in ("tales", "plays"):
        figures = record["validation"][text]
        assert figures["quantized"]["perplexity"] < 0.95 * uniform
        assert figures["quantized"]["perplexity"] == pytest.approx(
            figures["bfloat16"]["perplexity"], rel=QUANTIZED
        )


def test_texts_are_cut_and_held_out() -> None:
    tales, plays = read_tales(), read_plays()
    everything = "".join(tales.train + tales.valid)
    assert len(tales.train) + len(tales.valid) == 62
    assert tales.train[0].startswith("THE GOLDEN BIRD\n\nA certain king had a beautiful garden")
    assert tales.valid[-1].endswith("most beautiful roses, white and red.\n")
    assert "Gutenberg" not in everything and "CONTENTS" not in everything
    assert "\n\n 'No care and no sorrow,\n  A fig for the morrow!\n" in everything
    for text in (tales, plays):
        held_out = sum(map(len, text.valid)) / sum(map(len, text.train + text.valid))
        assert 0.04 < held_out < 0.1
    assert plays.train[0].startswith("First Citizen:\n")


def test_segmentations_differ_but_spell_the_same_text() -> None:
    text = read_tales()
    tokenizer = train_tokenizer([text], 600)
    documents = text.train[:2]
    plain = encode(tokenizer, documents)
    assert np.array_equal(encode_copies(tokenizer, documents, 1, 0.0, seed=0)[0], plain)
    copies = encode_copies(tokenizer, documents, 2, 0.2, seed=0)
    assert not np.array_equal(copies[0][:500], copies[1][:500])
    for copy in (plain, *copies):
        spelled = tokenizer.decode(list(copy), skip_special_tokens=False)
        assert spelled == "".join(END + document for document in documents)


def test_batches_depend_on_seed_and_step_alone() -> None:
    streams = [np.arange(100, dtype=np.int32), np.arange(1000, 1041, dtype=np.int32)]
    sampler = Sampler(streams, [[], []], [0.5, 0.5], seed=5)
    batch = sampler.batch(3, 64, 40, augment=1.0)
    assert batch.shape == (64, 41) and (np.diff(batch) == 1).all()
    assert {True, False} == set((batch[:, 0] >= 1000).tolist())
    assert np.array_equal(batch, sampler.batch(3, 64, 40, augment=1.0))
    assert not np.array_equal(batch, sampler.batch(4, 64, 40, augment=1.0))


@pytest.mark.parametrize(("size", "length", "stride"), [(100, 16, 8), (41, 40, 20), (7, 16, 16)])
def test_every_token_is_scored_once(size: int, length: int, stride: int) -> None:
    stream = np.arange(size, dtype=np.int32)
    cut = list(windows(stream, length, stride))
    scored = np.concatenate([window[len(window) - count :] for window, count in cut])
    assert np.array_equal(scored, stream[1:])
    assert max(len(window) for window, _ in cut) <= length + 1
    # With losses equal to the ids their total is a known sum.
    total = total_loss(lambda t: t[:, 1:].astype(mx.float32), stream, length, stride, rows=3)
    assert total == stream.sum()


def test_fake_quantization_gives_stored_values_and_a_straight_gradient() -> None:
    mx.random.seed(11)
    layer = nn.Linear(128, 41, bias=False)
    layer.weight = layer.weight.astype(mx.bfloat16)
    rounded = fake_quantize(layer.weight.astype(mx.float32))
    stored = nn.Sequential(layer.to_quantized(group_size=64, bits=4))
    expected = dequantize_model(stored).layers[0].weight.astype(mx.float32)
    assert_same_sums(rounded, expected)
    with pytest.raises(AssertionError):
        assert_same_sums(rounded, layer.weight.astype(mx.float32))
    gradient = mx.grad(lambda w: (3 * fake_quantize(w)).sum())(mx.zeros((4, 64)))
    assert mx.array_equal(gradient, mx.full((4, 64), 3.0))
