"""Damaged model directories, and what is said of each."""

from __future__ import annotations

import shutil

from damage import (
    INDEX,
    Case,
    config,
    cut,
    drop_tensor,
    duplicate_tensor,
    empty,
    entry,
    header,
    header_of,
    index_of,
    link,
    merge_special,
    only_torch,
    pipe,
    quantization,
    remove,
    rename_shard,
    repeat_key,
    to_file,
    write,
)

UP = "model.layers.0.mlp.up_proj"
CASES = [
    # The directory
    Case("path does not exist", shutil.rmtree, FileNotFoundError, ("no such directory",)),
    Case("a file, not a directory", to_file, NotADirectoryError, ("model is a directory",)),
    Case("empty directory", empty, FileNotFoundError, ("the directory is empty",)),
    # config.json
    Case("config.json missing", remove("config.json"), FileNotFoundError, ("config.json",)),
    Case("config.json truncated", cut("config.json", 0.5), ValueError, ("config.json", "JSON")),
    Case("config.json empty", write("config.json", ""), ValueError, ("config.json", "empty")),
    Case("config.json not JSON", write("config.json", "a: 1"), ValueError, ("config.json", "JSON")),
    Case(
        "config.json not text",
        write("config.json", b"\xff\xfe\x00{"),
        ValueError,
        ("config.json", "UTF-8"),
    ),
    Case("config.json a list", write("config.json", "[1]"), ValueError, ("config.json", "a list")),
    Case("model_type missing", config(model_type=...), ValueError, ("config.json", "model_type")),
    Case("model_type a number", config(model_type=3), ValueError, ("model_type", "3")),
    Case("model_type unknown", config(model_type="qwen99"), ValueError, ("qwen99",)),
    Case("hidden_size missing", config(hidden_size=...), ValueError, ("hidden_size",)),
    Case("hidden_size a string", config(hidden_size="wide"), ValueError, ("hidden_size", "'wide'")),
    Case("vocab_size negative", config(vocab_size=-4), ValueError, ("vocab_size", "-4")),
    Case("num_hidden_layers 2.5", config(num_hidden_layers=2.5), ValueError, ("layers", "2.5")),
    Case(
        "rope_scaling unknown",
        config(rope_scaling={"type": "magic", "factor": 2.0}),
        ValueError,
        ("mlx-lm builds no qwen2", "magic"),
    ),
    Case(
        "num_hidden_layers 10**9",
        config(num_hidden_layers=10**9),
        ValueError,
        ("config.json", "'num_hidden_layers' is 1000000000"),
    ),
    Case(
        "num_hidden_layers 10**9 of a part",
        config(text_config={"num_hidden_layers": 10**9}),
        ValueError,
        ("config.json", "'text_config.num_hidden_layers' is 1000000000"),
    ),
    Case("no attention heads", config(num_attention_heads=0), ValueError, ("attention_heads", "0")),
    Case(
        "more heads than width",
        config(num_attention_heads=256),
        ValueError,
        ("config.json", "256", "128"),
    ),
    Case(
        "no key-value heads", config(num_key_value_heads=0), ValueError, ("self_attn", "(0, 128)")
    ),
    Case(
        "narrower than a group",
        config(intermediate_size=1),
        ValueError,
        ("config.json", "model.layers.0.mlp.gate_proj", "(1, 128)", "(192, 2)"),
    ),
    Case("rope_theta 0", config(rope_theta=0), ValueError, ("rope_theta", "not 0")),
    Case("rope_theta a list", config(rope_theta=[]), ValueError, ("rope_theta", "not []")),
    Case("rope_theta text", config(rope_theta="fast"), ValueError, ("rope_theta", "'fast'")),
    Case("sliding_window text", config(sliding_window="x"), ValueError, ("_window", "not 'x'")),
    Case("config.json a pipe", pipe("config.json"), ValueError, ("config.json", "a pipe")),
    Case("config.json a device", link("config.json", "/dev/zero"), ValueError, ("a device",)),
    Case(
        "config.json of long numbers",
        write("config.json", '{"a": ' + "9" * 5000 + "}"),
        ValueError,
        ("config.json", "4300"),
    ),
    Case(
        "control characters",
        config(model_type="\x1b]0;mine\x07"),
        ValueError,
        (r"\x1b]0;mine\x07",),
    ),
    Case("more layers than weights", config(num_hidden_layers=3), ValueError, ("model.layers.2",)),
    Case("other width than the weights", config(hidden_size=256), ValueError, ("shape",)),
    Case(
        "code of its own",
        config(model_file="model.py"),
        ValueError,
        ("config.json", "model.py", "trust_remote_code"),
    ),
    # quantization
    Case("group_size 48", quantization(group_size=48), ValueError, ("group_size", "48")),
    Case("bits 9", quantization(bits=9), ValueError, ("bits", "9")),
    Case("mode unknown", quantization(mode="int4"), ValueError, ("mode", "int4")),
    Case("bits a string", quantization(bits="4"), ValueError, ("bits", "'4'")),
    Case("bits true", quantization(bits=True), ValueError, ("bits", "True")),
    Case("group_size missing", quantization(group_size=...), ValueError, ("group_size",)),
    Case(
        "quantization a string",
        config(quantization="4bit", quantization_config="4bit"),
        ValueError,
        ("quantization", "4bit"),
    ),
    Case("bits contradict the arrays", quantization(bits=8), ValueError, ("bits", "8", "4")),
    Case(
        "group_size contradicts the arrays",
        quantization(group_size=32),
        ValueError,
        ("group_size", "32", "64"),
    ),
    Case(
        "bits of one layer contradict",
        quantization(**{UP: {"group_size": 64, "bits": 8}}),
        ValueError,
        (UP, "bits", "8", "4"),
    ),
    Case(
        "a packed layer said not to be", quantization(**{UP: False}), ValueError, (UP, "not quant")
    ),
    Case("mode contradicts", quantization(mode="mxfp4", group_size=32), ValueError, ("mxfp4",)),
    Case(
        "width of a group does not divide",
        quantization(lm={"group_size": 100}),
        ValueError,
        ("lm.group_size", "100"),
    ),
    Case(
        "layer named by control characters",
        quantization(**{"\x1b[2J": {"bits": 4}}),
        ValueError,
        ("quantization", r"'\x1b[2J'"),
    ),
    Case("layer entry a number", quantization(**{UP: 4}), ValueError, (UP, "4")),
    # model.safetensors
    Case(
        "weights missing", remove("model.safetensors", INDEX), FileNotFoundError, (".safetensors",)
    ),
    Case("weights of torch", only_torch, FileNotFoundError, ("pytorch_model.bin",)),
    Case(
        "weights truncated",
        cut("model.safetensors", 0.6),
        ValueError,
        ("model.safetensors", "model.layers.", "exceeding the size of the file"),
    ),
    Case("weights a pipe", pipe("model.safetensors"), ValueError, ("model.safetensors", "a pipe")),
    Case(
        "weights linked in a circle",
        link("model.safetensors", "model.safetensors"),
        FileNotFoundError,
        ("model.safetensors", "no such file"),
    ),
    Case(
        "weights linked to nothing",
        link("model.safetensors", "absent"),
        FileNotFoundError,
        ("model.safetensors", "no such file"),
    ),
    Case(
        "another file a pipe",
        pipe("generation_config.json"),
        ValueError,
        ("n_config.json", "a pipe"),
    ),
    Case(
        "header nested deep",
        lambda path: header_of(path, "[" * 100_000),
        ValueError,
        ("model.safetensors", "header cannot be read"),
    ),
    Case("header truncated", cut("model.safetensors", 0.001), ValueError, ("cut short",)),
    Case("weights empty", write("model.safetensors", ""), ValueError, ("0 bytes",)),
    Case(
        "header length of 2**60",
        write("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        ValueError,
        (str(1 << 60),),
    ),
    Case(
        "header not JSON",
        write("model.safetensors", (8).to_bytes(8, "little") + b"{'a': 1}"),
        ValueError,
        ("header cannot be read",),
    ),
    Case("header a list", header(lambda _: [1]), ValueError, ("header is a list",)),
    Case("header repeats a tensor", repeat_key, ValueError, ("'x' appears twice",)),
    Case(
        "offsets beyond the file",
        entry(data_offsets=[0, 1 << 40]),
        ValueError,
        ("model.norm.weight", str(1 << 40)),
    ),
    Case("offsets reversed", entry(data_offsets=[8, 0]), ValueError, ("norm.weight", "(8, 0)")),
    Case("offsets of text", entry(data_offsets="0-8"), ValueError, ("model.norm.weight", "0-8")),
    Case(
        "entry a number", header(lambda entries: entries.update(x=1)), ValueError, ("'x'", "not 1")
    ),
    Case("entry of no shape", entry(shape=...), ValueError, ("model.norm.weight", "shape")),
    Case(
        "scales of one axis",
        header(lambda entries: entries[f"{UP}.scales"].update(shape=[384])),
        ValueError,
        (UP, "(192, 128)", "(384,)"),
    ),
    Case(
        "scales of no group",
        header(lambda entries: entries[f"{UP}.scales"].update(shape=[192, 0], data_offsets=[0, 0])),
        ValueError,
        (UP, "(192, 128)", "(192, 0)"),
    ),
    Case("shape too large", entry(shape=[1000]), ValueError, ("model.norm.weight", "2000 bytes")),
    Case(
        "shape negative", entry(shape=[-1, -128]), ValueError, ("model.norm.weight", "[-1, -128]")
    ),
    Case("dtype another", entry(dtype="F32"), ValueError, ("norm.weight", "512 bytes")),
    Case("dtype null", entry(dtype=None), ValueError, ("model.norm.weight", "None")),
    Case("dtype unknown", entry(dtype="F12"), ValueError, ("F12",)),
    Case("tensors overlap", entry(data_offsets=[2, 258]), ValueError, ("overlaps",)),
    Case("a tensor absent", drop_tensor, ValueError, (UP,)),
    Case("a tensor in two files", duplicate_tensor, ValueError, ("in both", "model-2")),
    Case("shard missing", rename_shard, FileNotFoundError, ("model-00002-of-00002", INDEX)),
    Case("index truncated", cut(INDEX, 0.5), ValueError, (INDEX,)),
    Case("index without a map", write(INDEX, "{}"), ValueError, (INDEX, "weight_map")),
    Case("index of numbers", write(INDEX, '{"weight_map": {"a": 1}}'), ValueError, (INDEX, "'a'")),
    Case(
        "index to another folder",
        index_of("../model.safetensors"),
        ValueError,
        ("'../model",),
    ),
    Case(
        "index to another file",
        index_of("config.json"),
        ValueError,
        (INDEX, "'config.json'"),
    ),
    Case(
        "index to a name too long",
        index_of(f"model{'a' * 300}.safetensors"),
        FileNotFoundError,
        ("missing",),
    ),
    # The tokenizer
    Case("tokenizer missing", remove("tokenizer.json"), FileNotFoundError, ("tokenizer.json",)),
    Case("tokenizer truncated", cut("tokenizer.json", 0.3), ValueError, ("tokenizer.json",)),
    Case("tokenizer a list", write("tokenizer.json", "[]"), ValueError, ("tokenizer.json",)),
    Case(
        "tokenizer of an unknown kind",
        write("tokenizer.json", '{"model": {"type": "Magic"}}'),
        ValueError,
        ("the tokenizer cannot be read",),
    ),
    Case(
        "tokenizer that merges a special token",
        merge_special,
        ValueError,
        ("the tokenizer cannot be read", "PanicException"),
    ),
    Case(
        "tokenizer_config.json not JSON",
        write("tokenizer_config.json", "{"),
        ValueError,
        ("tokenizer_config.json",),
    ),
]
