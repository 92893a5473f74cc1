"""The texts the model is trained on: documents, the tokenizer, and random batches of tokens."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

DATA = Path(__file__).parent / "data"
END = "<|endoftext|>"

# The pattern by which Qwen2 cuts text into words before it applies byte-pair merges.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Text:
    """One source, as documents for training and for validation."""

    name: str
    train: list[str]
    valid: list[str]


def read_tales(held_out: float = 0.05) -> Text:
    """Read Grimms' tales, one document a tale, and hold out the last of them.

    The front matter (credits, contents) and the back matter (notes on the brothers, Project
    Gutenberg's closing line) are cut. Lines of prose are joined into paragraphs, verse is kept.

    Args:
        held_out: The fraction of the characters kept for validation, to the next whole tale.
    """
    raw = (DATA / "grimms_fairy_tales.txt").read_text(encoding="ascii")
    body = raw[raw.index("THE BROTHERS GRIMM FAIRY TALES") : raw.rindex("*****")]
    tales = re.split(r"\n{4,}(?=[A-Z][^a-z\n]+\n\n)", body)[1:]
    documents = [unwrap(tale) for tale in tales]
    starts = np.cumsum([0] + [len(document) for document in documents])
    kept = int(np.searchsorted(starts, (1 - held_out) * starts[-1]))
    return Text("tales", documents[:kept], documents[kept:])


def read_plays(held_out: float = 0.05) -> Text:
    """Read Shakespeare's plays: one document for training and, from their end, one held out."""
    raw = (DATA / "tinyshakespeare.txt").read_text(encoding="ascii").strip() + "\n"
    cut = raw.index("\n\n", int(len(raw) * (1 - held_out))) + 2
    return Text("plays", [raw[:cut]], [raw[cut:]])


def unwrap(tale: str) -> str:
    """Join the lines of every paragraph of prose; leave those with indented lines as they are."""
    paragraphs = re.split(r"\n{2,}", tale.strip("\n"))
    joined = [p if "\n  " in p else " ".join(p.split()) for p in paragraphs]
    return "\n\n".join(joined) + "\n"


def train_tokenizer(texts: list[Text], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the training documents.

    As in Qwen2, text is brought to Unicode's NFC form first; every byte is in the vocabulary, so
    that any text in that form round-trips.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d for text in texts for d in text.train), trainer)
    return tokenizer


class SubwordSampler:
    """Byte-pair segmentation with randomly dropped merges (BPE-dropout, Provilkov et al. 2020).

    The `tokenizers` package has it too, but draws from a generator that cannot be seeded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        table = json.loads(tokenizer.to_str())["model"]
        self.vocab: dict[str, int] = table["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(table["merges"])}

    def split(self, word: str, dropout: float, rng: np.random.Generator) -> list[int]:
        """Return the token ids of one pre-tokenized word; a dropout of 0 is plain BPE."""
        parts = list(word)
        while len(parts) > 1:
            ranked = [
                (self.ranks[pair], i)
                for i, pair in enumerate(pairwise(parts))
                if pair in self.ranks and (dropout == 0 or rng.random() >= dropout)
            ]
            if not ranked:
                break
            i = min(ranked)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.vocab[part] for part in parts]


def encode(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.int32]:
    """Return one stream of token ids: every document preceded by the end-of-text token."""
    end = tokenizer.token_to_id(END)
    ids = [i for document in documents for i in (end, *tokenizer.encode(document).ids)]
    return np.array(ids, dtype=np.int32)


def encode_copies(
    tokenizer: Tokenizer, documents: list[str], copies: int, dropout: float, seed: int
) -> list[NDArray[np.int32]]:
    """Return `copies` streams of token ids of the same documents, each segmented differently."""
    rng = np.random.default_rng(seed)
    sampler = SubwordSampler(tokenizer)
    end = [tokenizer.token_to_id(END)]
    index: dict[str, int] = {END: 0}
    occurrences: list[int] = []
    for document in documents:
        occurrences.append(0)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(document):
            occurrences.append(index.setdefault(word, len(index)))
    variants = [
        end if word == END else sampler.split(word, dropout, rng)
        for word in index
        for _ in range(copies)
    ]
    lengths = np.array([len(v) for v in variants])
    starts = np.cumsum(lengths) - lengths
    flat = np.concatenate([np.array(v, dtype=np.int32) for v in variants])
    streams = []
    for _ in range(copies):
        chosen = np.array(occurrences) * copies + rng.integers(copies, size=len(occurrences))
        n = lengths[chosen]
        within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        streams.append(flat[np.repeat(starts[chosen], n) + within])
    return streams


@dataclass(frozen=True)
class Sampler:
    """Draws batches of token windows; a batch is a function of the seed and the step alone.

    Attributes:
        plain: One canonical token stream for each source.
        varied: For each source, streams of the same text in other segmentations.
        weights: The probability of each source.
        seed: The seed.
    """

    plain: list[NDArray[np.int32]]
    varied: list[list[NDArray[np.int32]]]
    weights: list[float]
    seed: int

    def batch(self, step: int, rows: int, length: int, augment: float) -> NDArray[np.int32]:
        """Return windows of `length + 1` tokens.

        Args:
            step: The training step.
            rows: The number of windows B.
            length: The number of tokens L of one window that the model is given.
            augment: The probability that a window comes from a varied stream.

        Returns:
            Token ids of shape (B, L + 1).
        """
        rng = np.random.default_rng((self.seed, step))
        return np.stack([self._window(rng, length + 1, augment) for _ in range(rows)])

    def _window(self, rng: np.random.Generator, size: int, augment: float) -> NDArray[np.int32]:
        source = rng.choice(len(self.plain), p=self.weights)
        stream = self.plain[source]
        if self.varied[source] and rng.random() < augment:
            stream = self.varied[source][rng.integers(len(self.varied[source]))]
        start = rng.integers(len(stream) - size + 1)
        return stream[start : start + size]


def windows(
    stream: NDArray[np.int32], length: int, stride: int
) -> Iterator[tuple[NDArray[np.int32], int]]:
    """Cut a stream into overlapping windows whose new tokens cover it exactly once.

    Args:
        stream: Token ids.
        length: The most tokens that the model is given at once.
        stride: The distance between the starts of two windows; at most `length`.

    Yields:
        A window of at most `length + 1` ids, and how many of its last ids are to be scored.
    """
    scored = 1
    for start in range(0, max(len(stream) - 1, 1), stride):
        window = stream[start : start + length + 1]
        end = start + len(window)
        if end > scored:
            yield window, end - scored
        scored = max(scored, end)
