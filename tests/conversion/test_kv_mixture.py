"""Bits of caches by what they cost: what is measured, what is chosen, and what is refused."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from mlx_qlayers.conversion import kv_mixture
from mlx_qlayers.decode.quantized_caches import CacheFormat, make_prompt_cache
from tests.step_models import pair


class Letters:
    """A tokenizer of letters."""

    def encode(self, text):
        return [ord(letter) % 60 for letter in text]


TEXT = "A king had a daughter, and a garden with an apple tree. " * 4
ROTATED = CacheFormat(32, hadamard=True)


def mixture(model, target, tokenizer=Letters, **options):
    options = {"form": ROTATED, "text": TEXT, "samples": 2, "length": 24} | options
    return kv_mixture.value_mixture(model, tokenizer(), target, **options)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_bits_go_where_they_help(name):
    """And no more than two to keys that are all zero, for which more bits change nothing."""
    _, model = pair(name)
    layer, keys = model.layers[0].self_attn, model.layers[0].self_attn.k_proj
    for known in (False, True):
        if known:
            layer.k_proj = lambda x: mx.zeros_like(keys(x))
        formats = mixture(model, 6.0)  # of float32 scales, two of them to 32 numbers
        bits = [n for form in formats for n in (form.bits, form.v_bits)]
        print(bits)
        assert 3.5 < sum(bits) / len(bits) <= 4.0 and (bits[0] == 2) == known and bits[1] > 2
        assert all(f.group_size == 32 and f.hadamard for f in formats)
    caches = make_prompt_cache(model, formats=formats)
    kinds = [type(c).__name__ for c in caches]
    assert {*kinds} <= {"PackedKVCache", "RotatingQuantizedKVCache"}
    assert (name == "gemma3_text") == any(isinstance(c, RotatingKVCache) for c in caches)
    assert "keys" in kv_mixture.summary(formats)


def test_what_is_refused():
    _, model = pair("qwen2")
    with pytest.raises(ValueError, match=r"3\.9 bits per value are too few: the least is 4"):
        mixture(model, 3.9)
    with pytest.raises(ValueError, match=r"has .* tokens, and a sequence is"):
        mixture(model, 6.0, length=10_000)
    with pytest.raises(ValueError, match="formats of 1 caches, and the model has"):
        make_prompt_cache(model, formats=[ROTATED])


def test_all_bits_where_there_is_room():
    _, model = pair("qwen2")
    assert {(f.bits, f.v_bits) for f in mixture(model, 16.0)} == {(8, 8)}


def test_only_the_ends_of_a_long_text_are_encoded():
    class Ends(Letters):
        def encode(self, text):
            assert text.count("b") < 2000 and text.startswith("a" * 30) and text.endswith("c" * 30)
            return super().encode(text)

    _, model = pair("qwen2")
    text = "a" * 30 + "b" * 9000 + "c" * 30
    assert mixture(model, 6.0, Ends, text=text)
