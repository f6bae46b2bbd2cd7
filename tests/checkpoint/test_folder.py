import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.checkpoint import folder, store


def _make(path, *names):
    for name in names:
        (path / name).mkdir()
        (path / name / "manifest.json").write_text("{}")


def test_find_tells_complete_from_unfinished_newest_first(tmp_path):
    _make(tmp_path, "step-00000005", "step-00000020", ".step-00000007.old")
    for name in (".step-00000030.tmp", "step-00000025", "step-soon", "other"):
        (tmp_path / name).mkdir()
    found = [(each.path.name, each.step, each.complete) for each in folder.find(tmp_path)]
    assert found == [
        ("step-00000030", 30, False),
        ("step-00000025", 25, False),
        ("step-00000020", 20, True),
        ("step-00000007", 7, True),
        ("step-00000005", 5, True),
    ]
    assert folder.find(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("newest", "every", "gone"),
    [(0, 0, []), (0, 20, []), (1, 0, [10, 20, 30, 40]), (2, 20, [10, 30]), (2, 0, [10, 20, 30]), (9, 0, [])],
)
def test_the_newest_and_the_multiples_stay(newest, every, gone):
    assert folder.surplus([30, 10, 50, 20, 40], newest, every) == gone


@pytest.mark.parametrize(
    ("uncounted", "newest", "every", "gone"),
    [
        ([40, 50], 2, 0, [10]),
        ([40, 50], 1, 0, [10, 20]),
        ([30, 40], 2, 0, [10, 30, 40]),
        ([30, 40], 2, 30, [10, 40]),
        ([10, 20, 30, 40, 50], 1, 0, []),
    ],
)
def test_of_those_that_do_not_count_only_older_ones_than_the_newest_that_counts_go(uncounted, newest, every, gone):
    assert folder.surplus([10, 20, 30, 40, 50], newest, every, uncounted) == gone


@given(st.sets(st.integers(0, 200)), st.integers(1, 5), st.integers(0, 50))
def test_the_newest_one_is_never_surplus(steps, newest, every):
    gone = folder.surplus(steps, newest, every)
    assert not set(gone) & set(sorted(steps)[-newest:])
    assert all(every == 0 or step % every for step in gone)


def test_pruning_deletes_whole_ones_and_what_interrupted_saves_left(tmp_path):
    _make(tmp_path, "step-00000001", "step-00000002", ".step-00000003.old", "step-00000004")
    (tmp_path / ".step-00000002.tmp").mkdir()
    (tmp_path / ".step-00000009.tmp").mkdir()  # may be under way
    folder.prune(tmp_path, newest=1, every=2)
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == [".step-00000009.tmp", "step-00000002", "step-00000004"]


def test_what_was_being_replaced_is_no_longer_complete(tmp_path, monkeypatch):
    _make(tmp_path, "step-00000001", "step-00000002")
    path = tmp_path / "step-00000001"
    (tmp_path / "step-00000002").rename(store.temporary(path))
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))  # killed there
    with pytest.raises(KeyboardInterrupt):
        store.commit(path)
    monkeypatch.undo()
    assert folder.is_complete(path)
    shutil.rmtree(path)  # by hand
    assert not folder.is_complete(path)  # what is left of the replaced one is not taken for it


def test_what_is_being_deleted_is_no_longer_complete(tmp_path, monkeypatch):
    _make(tmp_path, "step-00000001", "step-00000002")
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))  # killed there
    with pytest.raises(KeyboardInterrupt):
        folder.prune(tmp_path, newest=1, every=0)
    assert [(each.step, each.complete) for each in folder.find(tmp_path)] == [(2, True), (1, False)]
