import json
import os

import pytest

from zeroshard.host.errors import UserError
from zeroshard.train.state.lock import LOCK, RunLock


def test_a_folder_is_held_once_and_attempts_are_counted(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(UserError, match=r"^out: .* is in use by process \d+ on "):
        RunLock(tmp_path)
    first.require()
    first.close()
    first.close()
    second = RunLock(tmp_path)
    assert (first.attempt, second.attempt) == (1, 2)
    second.close()


def test_who_finds_a_later_attempt_writes_no_more(tmp_path):
    """On a file system that grants one lock twice."""
    lock = RunLock(tmp_path)
    (tmp_path / LOCK).write_text(json.dumps({"attempt": 2, "pid": 77, "host": "other"}))
    with pytest.raises(OSError, match=r"now belongs to process 77 on other, attempt 2: this run, attempt 1,"):
        lock.require()
    lock.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_was_removed_or_renamed_is_told_of(tmp_path, again):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(folder)
    if again:
        (folder / LOCK).unlink()
        folder.rmdir()
        folder.mkdir()  # of the same name, and no lock in it: what a new folder lacks is not made there
    else:
        folder.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="was removed or renamed while the run was writing there"):
        lock.require()
    assert not (folder / LOCK).exists()
    lock.close()


def test_a_lock_file_that_was_removed_alone_is_made_and_locked_again(tmp_path, capsys):
    lock = RunLock(tmp_path)
    (tmp_path / LOCK).unlink()
    lock.require()
    assert capsys.readouterr().err == (
        f"warning: {tmp_path / LOCK} was removed while the run was writing there; it is made and locked again\n"
    )
    with pytest.raises(UserError, match="is in use by process"):
        RunLock(tmp_path)
    (tmp_path / LOCK).write_text("")  # somebody emptied it: it is the run's as before
    lock.require()
    (tmp_path / LOCK).unlink()
    other = RunLock(tmp_path)  # of a run that came before the file was made again: it has the folder
    with pytest.raises(OSError, match="now belongs to process"):
        lock.require()
    other.close()
    lock.close()


@pytest.mark.parametrize("link", ["symlink", "dangling", "pipe"])
def test_what_is_no_lock_of_ours_is_left_as_it_is(tmp_path, link):
    precious = tmp_path / "precious"
    if link != "dangling":
        precious.write_text("kept")
    if link == "pipe":
        os.mkfifo(tmp_path / LOCK)
    else:
        (tmp_path / LOCK).symlink_to(precious)
    with pytest.raises(OSError, match="it is a named pipe" if link == "pipe" else "it is a symbolic link"):
        RunLock(tmp_path)
    assert precious.exists() == (link != "dangling")
    assert link == "dangling" or precious.read_text() == "kept"


@pytest.mark.parametrize(
    "words", ['{"attempt": "x"}', '{"attempt": 1e999}', "[1]", '{"attem', '{"attempt": -7}', "\xff"]
)
def test_a_lock_with_strange_words_counts_from_one(tmp_path, words):
    (tmp_path / LOCK).write_bytes(words.encode("latin-1"))
    lock = RunLock(tmp_path)
    assert lock.attempt == 1
    lock.close()
