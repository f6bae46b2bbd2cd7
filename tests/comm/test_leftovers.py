"""What a killed launcher left is removed by the next start; what is in use, or not ours, is not."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from zeroshard.launch.leftovers import owned_folder, remove_unowned


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_there_as_long_as_its_owner_wants_it(place):
    with owned_folder("zs-") as first, owned_folder("zs-") as second:
        assert Path(first).is_dir()
        assert Path(second).is_dir()
        assert remove_unowned(place, "zs-") == []
        assert {path.name for path in place.iterdir()} == {Path(first).name, Path(second).name}
    assert list(place.iterdir()) == []


def test_a_folder_whose_owner_was_killed_is_removed_by_the_next_start(place):
    child = os.fork()
    if child == 0:
        with owned_folder("zs-") as folder:
            Path(folder, "log").write_text("x")
            Path(place, "ready").touch()
            signal.pause()
    while not (place / "ready").exists():
        time.sleep(0.01)
    (left,) = place.glob("zs-*")
    with owned_folder("zs-"):
        assert left.exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert left.exists()
    with owned_folder("zs-"):
        assert not left.exists()


def test_what_is_no_launchers_is_left_alone(place):
    with owned_folder("zs-") as example:
        lock = next(path.name for path in Path(example).iterdir())
    plain, linked, piped, file = place / "zs-plain", place / "zs-linked", place / "zs-piped", place / "zs-file"
    plain.mkdir()
    (plain / "data").write_text("precious")
    real = place / "real"
    real.mkdir()
    (real / lock).touch()
    linked.symlink_to(real)
    piped.mkdir()
    os.mkfifo(piped / lock)
    file.touch()
    assert remove_unowned(place, "zs-") == []
    assert all(path.exists() for path in (plain / "data", real / lock, piped, file))


def test_another_users_folder_is_left_alone(place, monkeypatch):
    with owned_folder("zs-") as example:
        lock = next(path.name for path in Path(example).iterdir())
    theirs = place / "zs-theirs"
    theirs.mkdir()
    (theirs / lock).touch()
    monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    assert remove_unowned(place, "zs-") == []
    monkeypatch.undo()
    assert remove_unowned(place, "zs-") == [theirs]
