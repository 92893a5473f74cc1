"""Kernels of larger batches are there before a batch grows."""

import threading
import time
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models import qwen2
from mlx_lm.models.cache import BatchKVCache, KVCache
from recorded_gpu import made_ready, recorded_gpu, wide_model, zeros

from mlx_qlayers import explain

SIZES = (2, 3, 4, 5, 8, 9, 12, 16, 17, 24, 25, 32)


def step(model, count, kind=BatchKVCache):
    """The next step of so many sequences."""
    shape = count, 4, 40, 128
    caches = [kind([0] * count) if kind is BatchKVCache else kind() for _ in model.layers]
    for each in caches:
        each.update_and_fetch(zeros(shape, mx.bfloat16), mx.ones(shape, mx.bfloat16))
        mx.eval(each.keys, each.values)
    return model(zeros((count, 1), mx.int32), cache=caches)


@pytest.fixture
def made(request):
    """The kinds of kernels that are launched on a GPU, by text, template and dtypes."""
    found = set()
    device, name = getattr(request, "param", ("cuda", "sm_90"))
    with recorded_gpu(device, name):
        make = getattr(mx.fast, f"{device}_kernel")

        def kernel(**declared):
            launch = make(**declared)

            def run(**given):
                dtypes = [x.dtype for x in given["inputs"]]
                found.add(f"{declared['name']} {given['template']} {dtypes}")
                return launch(**given)

            return run

        with mock.patch.object(mx.fast, f"{device}_kernel", kernel):
            yield found


GPUS = [("cuda", "sm_90"), *(("metal", f"applegpu_g{n}") for n in ("13g", "16s", "17s"))]


@pytest.mark.parametrize("made", GPUS, indirect=True, ids=lambda gpu: gpu[1])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_a_batch_grows_without_new_kernels(made, name):
    model = wide_model(name, num_hidden_layers=2)
    explain(reset=True)
    step(model, 1)
    of_one = len(made)
    made_ready()
    of_all = len(made)
    # Nor is a step compiled, and nothing belongs to the thread, which has ended.
    with mock.patch.object(mx, "compile", side_effect=AssertionError("a step was made")):
        for count in SIZES:
            mx.eval(step(model, count))
    assert of_one < of_all == len(made)
    assert not [each for each in explain() if each.op == "step"]


def test_steps_ahead_are_calls_of_nobody(made):
    model = wide_model("qwen2", num_hidden_layers=2)
    explain(reset=True)
    step(model, 1)
    made_ready()
    assert {each.calls for each in explain() if each.op == "attention_step"} == {2}


def test_a_request_calls_its_steps_last(made):
    """Where another thread did, MLX has its traces for the next function at a step's address."""
    compiled, threads = mx.compile, []

    def recorded(function):
        of_step, run = [], compiled(function)
        threads.append(of_step)
        return lambda *given: (of_step.append(threading.current_thread()), run(*given))[1]

    with mock.patch.object(mx, "compile", recorded):
        step(wide_model("qwen2", num_hidden_layers=2), 1)
        made_ready()
    main = threading.current_thread()
    assert {each[-1] is main for each in threads if main in each} == {True}


def test_a_single_text_has_no_kernels_ahead(made):
    model = wide_model("qwen2", num_hidden_layers=2)
    step(model, 1, KVCache)
    of_one = len(made)
    made_ready()
    assert len(made) == of_one


def test_failures_ahead_are_told_and_stop_no_request(made):
    model = wide_model("qwen2", num_hidden_layers=2)
    kernel, main = mx.fast.cuda_kernel, threading.current_thread()

    def fails(**x):
        if threading.current_thread() is not main:
            raise RuntimeError("out of memory")
        return kernel(**x)

    explain(reset=True)
    with mock.patch.object(mx.fast, "cuda_kernel", fails):
        step(model, 1)
        made_ready()
    assert [each.reason for each in explain() if each.path == "not ahead"] == [
        "RuntimeError: out of memory"
    ]
    assert step(model, 2).shape == (2, 1, 152064)


def test_a_prompt_has_pythons_lock_to_itself(made):
    """Launches of the thread go on behind it."""
    model = wide_model("qwen2", num_hidden_layers=2)
    kernel, main, there, seen = mx.fast.cuda_kernel, threading.current_thread(), [], []

    def counted(**declared):
        launch = kernel(**declared)

        def run(**given):
            if threading.current_thread() is not main:
                there.append(declared["name"])
            elif prompt and not seen:
                for _ in range(2):  # at first the thread may be within a call
                    time.sleep(0.02)
                    seen.append(len(there))
            return launch(**given)

        return run

    prompt = False
    with mock.patch.object(mx.fast, "cuda_kernel", counted):
        step(model, 1)
        prompt = True
        model(zeros((1, 40), mx.int32), cache=[KVCache() for _ in model.layers])
        made_ready()
    assert seen[0] == seen[1] < len(there)


def test_ranks_sum_in_the_same_order(made, monkeypatch):
    """So a thread beside runs no step of a sharded model."""

    own = qwen2.MLP.__call__
    monkeypatch.setattr(qwen2.MLP, "__call__", lambda *given: mx.distributed.all_sum(own(*given)))
    model = wide_model("qwen2", num_hidden_layers=2)
    step(model, 1)
    of_one = len(made)
    made_ready()
    assert len(made) == of_one
