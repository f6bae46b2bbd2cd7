import os
from contextlib import suppress

import pytest
import torch

from zeroshard.checkpoint.streamed_safetensors import StreamedTensor, drafted, write_streamed
from zeroshard.host.errors import UserError


def _tensor(name, parts, shape, dtype=torch.float32):
    return StreamedTensor(name, dtype, shape, lambda: iter(parts))


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
