"""Manifests that were changed on purpose, checksum and all: each is refused in a line, or means what can be loaded.

What a manifest says of tensors is compared with the files' own headers, so there is no other meaning of the same bytes.
"""

import json

import pytest
import torch

from forged_manifests import read_facts, write_facts
from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.cli import main
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import ExitStatus, UserError


@pytest.fixture
def folder(tmp_path, evenly_sharded, some_tensors, monkeypatch):
    """A checkpoint of two ranks."""
    monkeypatch.setattr(store.os, "fsync", lambda descriptor: None)
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    extra = {"config": {"strategy": "zero2", "model": {"name": "gpt2-demo"}}, "position": {"tokens": 3}}
    run_threads(lambda comm: checkpoint.save(path, evenly_sharded(comm, some_tensors), step=1, extra=extra), 2)
    return path


def _change(facts, where, value):
    *way, last = where
    for key in way:
        facts = facts[key]
    facts[last] = value


FORGED = {
    "a shape of floats": (("tensors", 0, "shape"), [21.0]),
    "a shape with a boolean": (("tensors", 0, "shape"), [True, 21]),
    "a negative shape": (("tensors", 0, "shape"), [-7, -3]),
    "an endless shape": (("tensors", 6, "shape"), [0, 2**62, 2**62]),
    "a shape of 100 dimensions": (("tensors", 0, "shape"), [1] * 100),
    "tied is a number": (("tied",), 5),
    "a tied name that is saved": (("tied",), {"half": "block.weight"}),
    "a tied name of nothing": (("tied",), {"head": "nothing"}),
    "a kind that is a list": (("tensors", 0, "kind"), []),
    "a dtype that is none": (("tensors", 0, "dtype"), "F128"),
    "a name with half a character": (("tensors", 0, "name"), "\ud800"),
    "the name of another tensor": (("tensors", 0, "name"), "half"),
    "a file named NUL": (("tensors", 0, "pieces", 0, "file"), "\0"),
    "a file with a long name": (("tensors", 0, "pieces", 0, "file"), "a" * 300),
    "an interval of three": (("tensors", 0, "pieces", 0, "interval"), [0, 1, 2]),
    "an interval that runs back": (("tensors", 0, "pieces", 0, "interval"), [5, 2]),
    "a step that is text": (("step",), "1"),
    "no ranks": (("world_size",), 0),
    "a version that is a number": (("versions",), {"torch": 2}),
    "groups that are no list": (("param_groups",), {"a": 1}),
    "a group without a list of names": (("param_groups",), [{"params": [1]}]),
    "extra nested too deep": (("extra",), {"a": json.loads("[" * 90 + "]" * 90)}),
    "a fact that nobody knows": (("more",), 1),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_cannot_be_meant_is_refused_by_verify_too(folder, capsys, name):
    facts = read_facts(folder)
    _change(facts, *FORGED[name])
    write_facts(folder, facts)
    (damage,) = checkpoint.verify(folder)
    assert "contradicts itself (" in damage.what
    with pytest.raises(UserError, match="contradicts itself"):
        checkpoint.open_manifest(folder)
    assert main(["checkpoint", "verify", str(folder)]) == ExitStatus.CHECK_FAILED
    assert len(capsys.readouterr().out.splitlines()) == 1


SAME_BYTES = {
    "another dtype": lambda facts: _change(_tensor(facts, "half"), ("dtype",), "F16"),
    "two names exchanged": lambda facts: _exchange(_tensor(facts, "count"), _tensor(facts, "other"), "name"),
    "two kinds exchanged": lambda facts: _exchange(_tensor(facts, "pair", "a"), _tensor(facts, "pair", "b"), "kind"),
}


def _tensor(facts, name, kind=None):
    return next(each for each in facts["tensors"] if each["name"] == name and kind in (None, each["kind"]))


def _exchange(one, other, key):
    one[key], other[key] = other[key], one[key]


@pytest.mark.parametrize("name", SAME_BYTES)
def test_another_meaning_of_the_same_bytes_is_found_in_the_files_headers(tmp_path, evenly_sharded, some_tensors, name):
    tensors = some_tensors | {("other", "buffer"): torch.tensor(7)}
    tensors |= {("pair", "a"): torch.zeros(6), ("pair", "b"): torch.ones(6)}
    path = tmp_path / "c"
    run_threads(lambda comm: checkpoint.save(path, evenly_sharded(comm, tensors), step=1), 2)
    assert checkpoint.verify(path) == ()
    facts = read_facts(path)
    SAME_BYTES[name](facts)
    write_facts(path, facts)
    damages = checkpoint.verify(path)
    assert damages
    assert {damage.what for damage in damages} == {"is damaged: its header describes other tensors than the manifest"}
    with pytest.raises(UserError, match="describes other tensors than the manifest"):
        checkpoint.load(path, evenly_sharded(LocalCommunicator(), tensors))
