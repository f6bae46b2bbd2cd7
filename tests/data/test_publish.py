import pytest

from zeroshard.data.publish import draft_of, publish
from zeroshard.errors import UserError


def test_a_published_folder_is_all_that_is_left(tmp_path):
    out = tmp_path / "deep" / "data"
    with draft_of(out) as draft:
        (draft / "meta.json").write_text("{}")
        assert not out.exists()
        assert publish(draft, out, "meta.json")
    assert [each.name for each in out.parent.iterdir()] == ["data"]
    assert (out / "meta.json").read_text() == "{}"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path, error):
    def fail():
        with draft_of(tmp_path / "data") as draft:
            (draft / "half").write_text("x")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_writers_learns_that_it_lost(tmp_path):
    out = tmp_path / "data"
    with draft_of(out) as first, draft_of(out) as second:
        (first / "meta.json").write_text("first")
        (second / "meta.json").write_text("second")
        assert publish(first, out, "meta.json")
        assert not publish(second, out, "meta.json")
    assert (out / "meta.json").read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["data"]


def test_what_is_in_the_way_is_not_replaced(tmp_path):
    out = tmp_path / "data"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with draft_of(out) as draft, pytest.raises(OSError, match="not empty"):
        publish(draft, out, "meta.json")
    assert (out / "mine.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/data: .*; name a folder that can be written"):
        draft_of(tmp_path / "file" / "data").__enter__()

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(UserError) as caught:
        draft_of(tmp_path / "data").__enter__()
    assert str(caught.value) == (
        f"data.dir: cannot write {tmp_path}/data: Permission denied; name a folder that can be written, by --data.dir"
    )
