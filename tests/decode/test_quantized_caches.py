"""Quantized caches of batches and windows: sequences join, wrap and leave as if each were alone."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import texts
from architecture_table import ARCHITECTURES
from architectures import VOCABULARY
from mlx_lm.models import cache as stock
from step_models import as_graphs, left, models_of, pair

from mlx_qlayers import explain, use_backend
from mlx_qlayers.conversion.attention_patch import patched_attention
from mlx_qlayers.decode import engine, quantized_caches
from mlx_qlayers.decode.quantized_caches import CacheFormat, make_prompt_cache, quantized

HEADS, SHARE = 2, 3


@cache
def hadamard(n: int) -> np.ndarray:
    """The transform of a head."""
    signs = [[(-1.0) ** (i & j).bit_count() for i in range(n)] for j in range(n)]
    return np.array(signs) * n**-0.5


def width(form: CacheFormat) -> int:
    """Of a head that has two groups, or one of 128."""
    return max(64, form.group_size)


class Alone:
    """A sequence by itself: the rows that were given, packed by mx.quantize, in a list."""

    def __init__(self, size: int, form: CacheFormat) -> None:
        self.size, self.form = size, form
        self.rows: list[list[np.ndarray]] = [[], []]

    def add(self, *new: mx.array) -> None:
        """Keys and values (1, H, L, D)."""
        size, *widths, turned = self.form
        for rows, bits, x in zip(self.rows, widths, new, strict=True):
            packed = mx.quantize(mx.hadamard_transform(x) if turned else x, size, bits)
            numbers = np.array(mx.dequantize(*packed, size, bits))[0].astype(np.float64)
            numbers = numbers @ hadamard(numbers.shape[-1]) if turned else numbers
            rows += [numbers[:, i] for i in range(numbers.shape[1])]

    def attended(self, q: mx.array) -> np.ndarray:
        """Attention of the last tokens, (H, L, D) in float64, as a window shows the rows."""
        queries, (k, v) = np.array(q).astype(np.float64), map(np.array, self.rows)
        length, found = queries.shape[1], []
        for i in range(length):
            stop = len(k) - length + i + 1
            start = max(0, stop - self.size) if self.size else 0
            keys, values = (np.repeat(x[start:stop], SHARE, axis=1) for x in (k, v))
            scores = np.einsum("hd,shd->hs", queries[:, i], keys) * keys.shape[-1] ** -0.5
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            found.append(np.einsum("hs,shd->hd", shares / shares.sum(-1, keepdims=True), values))
        return np.stack(found, 1)


class Batch:
    """A cache of several sequences, and each of them alone."""

    def __init__(self, size: int, form: CacheFormat, seed: int) -> None:
        self.size, self.form = size, form
        self.random = np.random.default_rng(seed)
        self.cache, self.alone = None, list[Alone]()

    def new(self, length: int, heads: int = HEADS) -> mx.array:
        shape = len(self.alone), heads, length, width(self.form)
        return mx.array(self.random.normal(size=shape).astype(np.float32))

    def token(self, length: int = 1, counts: list[int] | None = None) -> None:
        """Tokens of each sequence, of which so many count: the others are padding behind them."""
        k, v, q = self.new(length), self.new(length), self.new(length, HEADS * SHARE)
        mask = self.cache.make_mask(length, return_array=True)
        caches = *self.cache.update_and_fetch(k, v), self.cache
        found = patched_attention(q, *caches, q.shape[-1] ** -0.5, mask)
        for i, each in enumerate(self.alone):
            count = length if counts is None else counts[i]
            if count:
                each.add(k[i : i + 1, :, :count], v[i : i + 1, :, :count])
                wanted = each.attended(q[i, :, :count])
                assert np.abs(np.array(found[i, :, :count]) - wanted).max() < 2e-5

    def prompts(self, counts: list[int], chunk: int) -> "Batch":
        """Prompts of several lengths in chunks, as mlx-lm's batches read them."""
        plain = stock.RotatingKVCache(self.size) if self.size else stock.KVCache()
        empty = [quantized(plain, *self.form) for _ in counts]
        self.cache = empty[0].merge(empty)
        self.alone = [Alone(self.size, self.form) for _ in counts]
        longest = max(counts)
        self.cache.prepare(lengths=counts, right_padding=[longest - n for n in counts])
        for at in range(0, longest, chunk):
            length = min(chunk, longest - at)
            self.token(length, [min(max(n - at, 0), length) for n in counts])
        self.cache.finalize()
        return self

    def extend(self, other: "Batch") -> None:
        self.cache.extend(other.cache)
        self.alone += other.alone

    def trim(self, count: int) -> None:
        assert self.cache.trim(count) == count
        for each in self.alone:
            each.rows = [rows[:-count] for rows in each.rows]

    def leave(self, keep: list[int]) -> None:
        self.cache.filter(keep)
        self.alone = [self.alone[i] for i in keep]


FORMATS = [
    CacheFormat(32, 8, 8),
    CacheFormat(32, 4, 4),
    CacheFormat(64, 8, 4),
    CacheFormat(32, 3, 2, hadamard=True),
    CacheFormat(128, 4, 8),
    CacheFormat(128, 8, 4, hadamard=True),
]


@pytest.mark.parametrize("backend", ["reference", "host"])
@pytest.mark.parametrize("size", [0, 12], ids=["whole", "window"])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_sequences_of_a_batch_are_as_each_alone(form, size, backend, tmp_path):
    """By an oracle in float64 which attends to the same packed rows."""
    with use_backend(backend):
        batch = Batch(size, form, form.bits).prompts([3, 17, 9], chunk=5)
        for _ in range(4):
            batch.token()
        batch.extend(Batch(size, form, 7).prompts([6, 1], chunk=4))
        for _ in range(15):  # a window goes round
            batch.token()
        batch.leave([0, 2, 4])
        batch.cache = type(batch.cache).from_state(batch.cache.state)
        batch.token()
        # Each sequence leaves by itself, is stored and read, and joins again in another place.
        singles = [batch.cache.extract(i) for i in (2, 0, 1)]
        path = str(tmp_path / "caches.safetensors")
        stock.save_prompt_cache(path, singles)
        read = stock.load_prompt_cache(path)
        assert [type(c).__name__ for c in read] == [type(c).__name__ for c in singles]
        nbytes = sum(a.nbytes for c in singles for each in (c.keys, c.values) for a in each)
        assert sum(c.nbytes for c in singles) == nbytes
        read = [quantized(c) for c in read]  # mlx-lm's own class, which has no merge
        batch.cache = read[0].merge(read)
        batch.alone = [batch.alone[i] for i in (2, 0, 1)]
        batch.token(2)
        for _ in range(3):
            batch.token()
        if not size:
            batch.trim(2)
            batch.token()
        assert {d.path for d in explain() if d.op == "attention"} >= {backend}


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]


def written(
    path: str, model: nn.Module, prompts: list[list[int]], make: Callable[[], list[Any]]
) -> list[Any]:
    """Texts alone and in a batch, by graphs as a GPU or a CPU has them."""
    explain(reset=True)
    with as_graphs() if path == "a GPU" else nullcontext():
        found = texts.alone_and_in_a_batch(model, prompts, 14, make)
    assert left(model) <= 2
    return found


@pytest.mark.parametrize("path", ["a GPU", "a CPU"])
@pytest.mark.parametrize(("name", "window"), [("phi3", None), ("phi3", 8), ("gemma3_text", None)])
def test_texts_alone_and_in_a_batch_are_those_of_stock(name, window, path):
    """By graphs, of which the stock model alone has none."""
    plain, model = pair(name)

    def make() -> list[Any]:
        if window:  # mlx-lm's own makes ones that keep rows, of which a batch keeps none
            return [quantized(stock.RotatingKVCache(window), 32, 8) for _ in plain.layers]
        return make_prompt_cache(plain, formats=CacheFormat(32, 8))

    wanted = []
    for prompt in PROMPTS:
        # mlx-lm's own class, where it has one.
        cache = [
            stock.QuantizedKVCache(32, 8) if type(c).__name__ == "QuantizedKVCache" else c
            for c in make()
        ]
        wanted.append(texts.plain(plain, prompt, 14, prompt_cache=cache))
    assert written(path, model, PROMPTS, make) == [wanted, wanted]
    forms = {
        type(form).__name__
        for steps in engine._steps.values()
        if steps.model() is model
        for each in steps.steps.values()
        for step in each
        for form in step.programs.values()
    }
    assert forms >= ({"AppendForm"} if path == "a GPU" else {"Form"})


class Rounded(stock.KVCache):
    """mlx-lm's plain cache with what packed rows stand for."""

    def __init__(self, form: CacheFormat) -> None:
        super().__init__()
        self.form = form

    def update_and_fetch(self, *new: mx.array) -> tuple[mx.array, mx.array]:
        size, *widths, turned = self.form
        rows = []
        for x, bits in zip(new, widths, strict=True):
            x = mx.hadamard_transform(x) if turned else x
            x = mx.dequantize(*mx.quantize(x, size, bits), size, bits)
            rows.append(mx.hadamard_transform(x) if turned else x)
        return super().update_and_fetch(*rows)


@pytest.mark.parametrize("path", ["a GPU", "a CPU"])
@pytest.mark.parametrize(
    "form", [CacheFormat(32, 8, 4), CacheFormat(32, 3, 3, True), CacheFormat(128, 8, 4)], ids=str
)
def test_texts_in_formats_of_this_package(form, path):
    """By graphs, as stock with the numbers that the caches hold; stock itself refuses them."""
    qwen2, heads = ARCHITECTURES["qwen2"], 128 // form.group_size
    config = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2)}
    plain, model = models_of("qwen2", qwen2._replace(config=qwen2.config | config))
    caches = [Rounded(form) for _ in plain.layers]
    prompt, prompts = PROMPTS[2], [PROMPTS[2], [1, 2], PROMPTS[2]]
    wanted = texts.plain(plain, prompt, 14, prompt_cache=caches)

    def make() -> list[Any]:
        return make_prompt_cache(plain, formats=form)

    alone, batch = written(path, model, prompts, make)
    assert path == "a GPU" or engine.stopped(model) is None
    assert alone[::2] == batch[::2] == [wanted, wanted]
    with pytest.raises(ValueError, match="convert_model first"):
        plain(mx.array([prompt]), cache=make())


def test_tokens_of_a_batch_are_read_packed_on_a_cpu():
    """By the kernel, with the mask of sequences of several lengths."""
    _, model = pair("phi3")
    tokens = mx.random.randint(0, VOCABULARY, (2, 9), key=mx.random.key(2))
    with use_backend("host"):
        cache = [quantized(stock.BatchKVCache([3, 0]), 32, 8) for _ in model.layers]
        model(tokens[:, :6], cache=cache)
        explain(reset=True)
        for i in range(6, 9):
            mx.eval(model(tokens[:, i : i + 1], cache=cache))
        packed = [d for d in explain() if d.op == "attention"]
        assert sum(d.calls for d in packed) >= 3 * len(cache)
        assert {d.path for d in packed} == {"host"}


def test_a_window_that_is_not_full_is_trimmed():
    form = FORMATS[3]
    batch = Batch(20, form, 5).prompts([7, 3], chunk=4)
    assert batch.cache.is_trimmable()
    batch.trim(2)
    batch.token()
    single = batch.cache.extract(0)
    assert single.is_trimmable() and single.trim(3) == 3 and single.size() == 3


def test_a_head_that_has_no_whole_groups_is_named():
    with pytest.raises(ValueError, match=r"groups of 64 .* heads of 96"):
        quantized(stock.KVCache(), 64, 4, hadamard=True).update_and_fetch(
            *[mx.ones((1, 2, 5, 96))] * 2
        )


def test_caches_that_are_packed_otherwise_do_not_meet():
    one, *others = (quantized(stock.KVCache(), *form) for form in FORMATS)
    for other in others:
        with pytest.raises(ValueError, match="packed in other ways"):
            one.merge([one, other])


def test_a_full_cache_is_packed_once(monkeypatch):
    """Windows too; what is quantized stays as it is, as do caches of states."""
    model = pair("phi3")[0]
    caches = [stock.KVCache(), stock.RotatingKVCache(8), stock.ArraysCache(2)]
    for c in caches[:2]:
        c.update_and_fetch(mx.ones((1, 2, 11, 64)), mx.ones((1, 2, 11, 64)))
    quantized_caches.maybe_quantize_kv_cache(caches[:2], 12, 32, 4)
    assert [type(c).__module__ for c in caches] == ["mlx_lm.models.cache"] * 3
    quantized_caches.maybe_quantize_kv_cache(caches, 5, 32, 4)
    names = ["QuantizedKVCache", "RotatingQuantizedKVCache", "ArraysCache"]
    assert [type(c).__name__ for c in caches] == names
    before = [*caches]
    quantized_caches.maybe_quantize_kv_cache(caches, 5, 32, 4)
    assert caches == before
    assert len(make_prompt_cache(model)) == len(model.layers)
