import os
from contextlib import suppress

import pytest
import torch
from safetensors import safe_open

from zeroshard.checkpoint.streamed_safetensors import StreamedTensor, drafted, intervals, write_streamed
from zeroshard.errors import UserError


def _tensor(name, parts, shape, dtype=torch.float32):
    return StreamedTensor(name, dtype, shape, lambda: iter(parts))


def test_any_reader_finds_what_came_in_parts(tmp_path):
    whole = torch.randn(5, 4)
    path = tmp_path / "x.safetensors"
    tensors = [
        _tensor("rows", [whole[:2], whole[2:].double()], (5, 4)),
        _tensor("columns", [whole.t()], (4, 5), torch.bfloat16),
        _tensor("scalar", [torch.tensor(3)], (), torch.int64),
        _tensor("empty", [], (0, 2)),
    ]
    write_streamed(path, tensors, {"format": "pt"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
    assert torch.equal(found["rows"], whole)
    assert torch.equal(found["columns"], whole.t().bfloat16())
    assert torch.equal(found["scalar"], torch.tensor(3))
    assert found["empty"].shape == (0, 2)


def test_a_file_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor)))
    write_streamed(tmp_path / "x", [_tensor("x", [torch.zeros(20)], (5, 4))])
    facts = (tmp_path / "x").stat()
    assert [(each.st_ino, each.st_size) for each in flushed] == [(facts.st_ino, facts.st_size)]


@pytest.mark.parametrize("numel", [19, 21])
def test_parts_that_are_not_the_tensor_are_an_error(tmp_path, numel):
    with pytest.raises(ValueError, match=f"x: {numel} elements came for shape"):
        write_streamed(tmp_path / "x", [_tensor("x", [torch.zeros(numel)], (5, 4))])


def test_intervals_cover_every_element_once(monkeypatch):
    monkeypatch.setattr("zeroshard.checkpoint.streamed_safetensors.CHUNK_NUMEL", 4)
    assert list(intervals(0)) == []
    assert list(intervals(4)) == [(0, 4)]
    assert list(intervals(9)) == [(0, 4), (4, 8), (8, 9)]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "deep" / "out"
    with suppress(RuntimeError), drafted(out) as draft:
        (draft / "half").write_text("")
        raise RuntimeError
    assert list((tmp_path / "deep").iterdir()) == []
    out.mkdir()  # an empty one may be taken
    with drafted(out) as draft:
        (draft / "whole").write_text("")
        assert list(out.parent.iterdir()) == [draft]
    assert [entry.name for entry in out.iterdir()] == ["whole"]
    with pytest.raises(UserError, match=r"out: .* is there already; name a new folder"), drafted(out):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), drafted(tmp_path / "file" / "out"):
        pass
