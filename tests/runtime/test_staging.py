"""Directories that appear whole or not at all."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_qlayers.runtime.staging import replace_file, staged_directory


def test_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "a" / "model"
    with staged_directory(target) as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "file").write_text("whole")
        assert not target.exists()
        assert staging.parent == target.parent and staging.name.startswith(".model.mlx-qlayers-")
    assert (target / "sub" / "file").read_text() == "whole"
    assert os.listdir(target.parent) == ["model"]
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o777 & ~mask


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), staged_directory(tmp_path / "model") as staging:
        (staging / "file").write_text("half")
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


def test_an_empty_target_and_a_link_to_one_are_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with staged_directory(tmp_path / "link") as staging:
        (staging / "file").touch()
    assert (tmp_path / "empty" / "file").exists() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_taken_target_is_kept(when, tmp_path):
    target = tmp_path / "model"
    if when == "before":
        target.write_text("mine")
    with pytest.raises(FileExistsError, match="model: exists"), staged_directory(target) as staging:
        (staging / "file").touch()
        target.mkdir()
        (target / "mine").touch()
    assert os.listdir(tmp_path) == ["model"]
    assert target.is_file() or os.listdir(target) == ["mine"]


def test_leftovers_go_and_work_in_progress_stays(tmp_path):
    target = tmp_path / "mod[e]l*"
    leftover = tmp_path / ".mod[e]l*.mlx-qlayers-0123abcd"
    leftover.mkdir()
    (leftover / "model.safetensors").touch()
    others = [tmp_path / name for name in (".model.mlx-qlayers-0123abcd", ".mod[e]l*.old")]
    for other in others:
        other.mkdir()
    with staged_directory(target) as first:
        assert not leftover.exists()
        with pytest.raises(FileExistsError), staged_directory(target) as second:
            assert first.exists() and second != first
            target.mkdir()
            (target / "file").touch()
        (target / "file").unlink()
    assert target.is_dir() and not first.exists() and all(other.exists() for other in others)


def test_writers_of_a_folder_leave_the_files_of_each_other_alone(tmp_path):
    paths = [tmp_path / str(number) for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(replace_file, paths, [b"whole"] * len(paths)))
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert all(path.read_bytes() == b"whole" for path in paths)
