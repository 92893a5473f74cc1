"""The command generate: text, speeds, sampling, and where the prompt comes from."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from command_line import PROMPT
from head_checkpoints import head_of
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from tiny_model import save_tiny_model

from mlx_qlayers import convert_model, explain
from mlx_qlayers.cli import main
from mlx_qlayers.decode import quantized_caches
from mlx_qlayers.decode.quantized_caches import CacheFormat, quantized


@pytest.mark.parametrize("stock", [[], ["--no-fuse"], ["--batch-invariant"], ["--stock"]], ids=str)
def test_generate_says_what_mlx_lm_says(stock, exact_model, capsys):
    arguments = ["--model", str(exact_model), "--prompt", PROMPT, "--max-tokens", "40"]
    assert main(["generate", *arguments, *stock]) == 0
    out, err = capsys.readouterr()
    model, tokenizer = mlx_lm.load(str(exact_model))
    assert out == mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=40) + "\n"
    assert re.fullmatch(
        r"(mlx-qlayers: compiling kernel .*\n)*"
        r"prompt: \d+ tokens, [\d.]+ tokens/s; text: \d+ tokens, [\d.]+ tokens/s; "
        r"peak memory [\d.]+ GB\n",
        err,
    )


def generated(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> str:
    """The standard output of the command."""
    assert main(["generate", f"--model={model}", "--max-tokens=12", *arguments]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_sampling_follows_the_seed(tiny_model, capsys):
    arguments = f"--prompt={PROMPT}", "--temp=1.5"
    texts = [generated(capsys, tiny_model, *arguments, f"--seed={seed}") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_from_standard_input(exact_model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    texts = [generated(capsys, exact_model, f"--prompt={prompt}") for prompt in ("-", PROMPT)]
    assert texts[0] == texts[1]


def test_options_of_mlx_lm(exact_model, adapters, capsys):
    prompt = f"--prompt={PROMPT}"
    model, tokenizer = mlx_lm.load(str(exact_model))

    def stock(**options: object) -> str:
        return mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=12, **options)

    plain = generated(capsys, exact_model, prompt)
    assert plain == stock()
    assert generated(capsys, exact_model, prompt, "--temp=2", "--top-k=1") == plain
    assert generated(capsys, exact_model, prompt, "--temp=2", "--top-p=1e-6") == plain
    assert generated(capsys, exact_model, prompt, "--verbose=False") == plain
    cache = {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": 0}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in cache.items()]
    assert generated(capsys, exact_model, prompt, *flags) == stock(**cache) != plain
    model, tokenizer = mlx_lm.load(str(exact_model), adapter_path=str(adapters))
    assert generated(capsys, exact_model, prompt, f"--adapter-path={adapters}") == stock() != plain


def test_the_backend_is_chosen_and_the_report_is_printed(tiny_model, capsys):
    explain(reset=True)
    arguments = [f"--model={tiny_model}", f"--prompt={PROMPT}", "--max-tokens=2"]
    assert main(["generate", *arguments, "--backend=reference", "--report"]) == 0
    assert {(d.path, d.reason) for d in explain()} == {("reference", "asked for")}
    err = capsys.readouterr().err
    assert "model.layers.0-1.self_attn.q_proj" in err and "19 swapped" in err


def test_chat_template_is_used_where_there_is_one(exact_model, tmp_path, capsys):
    path = shutil.copytree(exact_model, tmp_path / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    templated = generated(capsys, exact_model, "--prompt=[king]")
    plain = generated(capsys, exact_model, "--prompt=king")
    assert generated(capsys, path, "--prompt=king") == templated != plain
    assert generated(capsys, path, "--prompt=king", "--ignore-chat-template") == plain


def assert_same_text(
    capsys: pytest.CaptureFixture[str], model: Path, temp: str, *sources: list[str]
) -> None:
    """Guesses of each source change no text, and are told of."""
    arguments = ["generate", f"--model={model}", f"--prompt={PROMPT}", f"--temp={temp}"]
    arguments.append("--max-tokens=30")
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "guesses" not in err
    for source in sources:
        assert main([*arguments, *source]) == 0
        found, err = capsys.readouterr()
        assert found == out
        assert re.search(r"guesses: \d+ of \d+ accepted in \d+ rounds, .* tokens/s", err)


@pytest.mark.parametrize("temp", ["0", "0.9"])
def test_guesses_change_no_text(temp, exact_model, capsys):
    """Of a look-up and of a draft model, here the model itself, whose guesses are right."""
    draft = [f"--draft-model={exact_model}", "--num-draft-tokens", "3"]
    sources = ["--prompt-lookup"], draft, [*draft, "--prompt-lookup", "--verbose=False"]
    assert_same_text(capsys, exact_model, temp, *sources)


def test_heads_change_no_text(tmp_path, capsys, monkeypatch):
    """Of a checkpoint of MiMo with a head, and of another file beside look-ups; also in a chat."""
    options = {"dtype": mx.float32, "torch_dtype": "float32", "seed": 3, "model_type": "mimo"}
    path = save_tiny_model(tmp_path / "mimo", **options)
    mx.save_safetensors(str(path / "model-heads.safetensors"), head_of("mimo"))
    other = tmp_path / "heads.safetensors"
    mx.save_safetensors(str(other), head_of("mimo"))
    few = "--num-draft-tokens=2"
    sources = ["--heads", few], ["--prompt-lookup", "--heads", str(other), few]
    assert_same_text(capsys, path, "0.9", *sources)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[-1]['content'] }}"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = ["chat", f"--model={path}", "--temp=0", "--max-tokens=9"]
    said = []
    for source in ([], ["--heads", few]):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n{PROMPT}\nq\n"))
        assert main([*chat, *source]) == 0
        out, err = capsys.readouterr()
        said.append([line for line in out.splitlines() if "tok/s" not in line])
    assert said[0] == said[1] and err.count("guesses: ") == 2
    arguments = ["generate", f"--model={path}", f"--prompt={PROMPT}"]
    assert main([*arguments, "--heads", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such directory" in capsys.readouterr().err


def test_a_window_is_quantized(exact_model, capsys):
    """Which mlx-lm refuses; the text is that of the stock model with such caches."""
    arguments = ["--max-kv-size=40", "--kv-bits=8", "--kv-group-size=32", "--quantized-kv-start=9"]
    model, tokenizer = mlx_lm.load(str(exact_model))
    cache = make_prompt_cache(model, 40)
    tokens = tokenizer.encode(PROMPT)
    model(mx.array([tokens[:-1]]), cache=cache)  # a prompt is read before it is quantized
    cache = [quantized(c, 32, 8) for c in cache]
    wanted = mlx_lm.generate(model, tokenizer, tokens[-1:], max_tokens=60, prompt_cache=cache)
    prompt = f"--prompt={PROMPT}", "--max-tokens=60"
    assert generated(capsys, exact_model, *prompt, *arguments) == wanted
    assert generated(capsys, exact_model, *prompt, *arguments, "--prompt-lookup") == wanted
    rotated = [*arguments[:1], "--kv-bits=8,4", "--kv-rotate", *arguments[2:]]
    convert_model(model)
    cache = make_prompt_cache(model, 40)
    model(mx.array([tokens[:-1]]), cache=cache)
    cache = [quantized(c, 32, 8, 4, hadamard=True) for c in cache]
    text = mlx_lm.generate(model, tokenizer, tokens[-1:], max_tokens=60, prompt_cache=cache)
    assert generated(capsys, exact_model, *prompt, *rotated) == text
    assert generated(capsys, exact_model, *prompt, *rotated, "--prompt-lookup") == text
    with pytest.raises(NotImplementedError):
        cache = make_prompt_cache(model, 40)
        mlx_lm.generate(
            model, tokenizer, PROMPT, prompt_cache=cache, kv_bits=8, quantized_kv_start=9
        )


def test_a_prompt_cache_is_in_the_format_asked_for(exact_model, tmp_path, capsys):
    """It goes on where it was stored; another format, and options that contradict, are refused."""
    model, tokenizer = mlx_lm.load(str(exact_model))
    convert_model(model)
    tokens, form = tokenizer.encode(PROMPT), CacheFormat(32, 4, 3, hadamard=True)
    cache = quantized_caches.make_prompt_cache(model, formats=form)
    model(mx.array([tokens]), cache=cache)
    path = tmp_path / "cache.safetensors"
    facts = {"model": str(exact_model), "tokenizer_config": "{}"}
    save_prompt_cache(str(path), cache, facts)
    text = mlx_lm.generate(model, tokenizer, tokens, max_tokens=12, prompt_cache=cache)
    arguments = [f"--prompt={PROMPT}", "--ignore-chat-template", "--max-tokens=12"]
    given = [f"--prompt-cache-file={path}", "--kv-group-size=32"]
    assert generated(capsys, exact_model, *arguments, *given) == text
    asked = [*given, "--kv-bits=4,3", "--kv-rotate"]
    assert generated(capsys, exact_model, *arguments, *asked) == text
    command = ["generate", f"--model={exact_model}", *arguments]
    for options, message in (
        ([*given, "--kv-bits=4,3"], "packed in another way than asked for"),
        (["--kv-bits=4", "--kv-bits-per-value=4"], "two ways to say the same"),
        (["--kv-rotate"], "--kv-rotate needs --kv-bits or --kv-bits-per-value"),
        (["--kv-bits=4,7"], "or two with a comma between"),
        (["--kv-bits=4,4,4"], "must be one number, or two"),
    ):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err


def test_bits_of_caches_by_what_they_cost(exact_model, tmp_path, capsys):
    options = ["--kv-bits-per-value=5", "--kv-rotate", "--quantized-kv-start=0", "--max-tokens=9"]
    arguments = [f"--model={exact_model}", f"--prompt={PROMPT}", "--kv-group-size=32", *options]
    assert main(["generate", *arguments]) == 0
    assert re.search("caches: keys . bits in . layers.*; values", capsys.readouterr().err)
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 20)
    sizes = [f"--text={text}", "--samples=1", "--sequence-length=32", "--kv-group-size=32"]
    for options, names in (
        (["--kv-bits=8,3", "--kv-rotate"], ["8 and 3 bits in caches", "rotated"]),
        (["--kv-bits-per-value=5"], ["5 bits a value in caches"]),
    ):
        assert main(["perplexity", f"--model={exact_model}", *sizes, *options]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in names)
        rises = [line.split()[-1] for line in out.splitlines()[2:]]
        assert float(rises[1]) == 0.0 and all(0 < float(rise) < 1 for rise in rises[2:])
