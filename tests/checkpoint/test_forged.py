"""Manifests that were changed on purpose, checksum and all: each is refused in a line, or means what can be loaded.

What a manifest says of tensors is compared with the files' own headers, so there is no other meaning of the same bytes.
"""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch

from soak import examples
from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.checkpoint.manifest_text import seal
from zeroshard.cli import main
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import ExitStatus, UserError

NASTY = (
    *(
        None,
        True,
        False,
        [],
        {},
        "",
        "\0",
        "\ud800",
        "../x",
        "a" * 300,
        "F32",
        "I32",
        "param",
        "x\nerror: y",
        "\x1b[2J",
    ),
    *(0, 1, -1, 2, 4.0, 1e300, 10**400, 2**63, 2**63 - 1, 2**31, 5, [4.0], [True, 2], [-1, -2], [[]], {"a": 1}, ["a"]),
)


@pytest.fixture
def folder(tmp_path, evenly_sharded, some_tensors, monkeypatch):
    """A checkpoint of two ranks."""
    monkeypatch.setattr(store.os, "fsync", lambda descriptor: None)
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    extra = {"config": {"strategy": "zero2", "model": {"name": "gpt2-demo"}}, "position": {"tokens": 3}}
    run_threads(lambda comm: checkpoint.save(path, evenly_sharded(comm, some_tensors), step=1, extra=extra), 2)
    return path


def _write(path, facts):
    content = {key: value for key, value in facts.items() if key not in ("format", "version", "sha256")}
    (path / "manifest.json").write_text("".join(seal(content)))


def _facts(path):
    facts = json.loads((path / "manifest.json").read_text())
    del facts["sha256"]
    return facts


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
    facts = _facts(folder)
    _change(facts, *FORGED[name])
    _write(folder, facts)
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
    facts = _facts(path)
    SAME_BYTES[name](facts)
    _write(path, facts)
    damages = checkpoint.verify(path)
    assert damages
    assert {damage.what for damage in damages} == {"is damaged: its header describes other tensors than the manifest"}
    with pytest.raises(UserError, match="describes other tensors than the manifest"):
        checkpoint.load(path, evenly_sharded(LocalCommunicator(), tensors))


def _places(facts, where=()):
    """Every place in the facts, by its way there."""
    inner = facts.items() if isinstance(facts, dict) else enumerate(facts) if isinstance(facts, list) else ()
    for key, value in inner:
        yield (*where, key)
        yield from _places(value, (*where, key))


def _mutated(draw, facts):
    """A copy with one or two places changed, removed, doubled or exchanged."""
    facts = json.loads(json.dumps(facts))
    for _ in range(draw.choice((1, 1, 2))):
        where = draw.choice(list(_places(facts)))
        parent = facts
        for key in where[:-1]:
            parent = parent[key]
        kind = draw.choice(("value", "value", "value", "remove", "add", "neighbour"))
        if kind == "remove":
            del parent[where[-1]]
        elif kind == "add" and isinstance(parent, list):
            parent.append(draw.choice((parent[where[-1]], *NASTY)))
        elif kind == "add":
            parent[draw.choice(("x", "\0", "\ud800", "shape"))] = draw.choice(NASTY)
        elif kind == "neighbour":
            other = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[where[-1]] = parent[other]
        else:
            value = parent[where[-1]]
            parent[where[-1]] = value + draw.choice((-1, 1)) if type(value) is int else draw.choice(NASTY)
    return facts


def test_no_forged_manifest_ends_in_a_traceback_or_other_tensors(folder, evenly_sharded, some_tensors, capsys):
    draw, good, num_forged = random.Random(0), _facts(folder), examples(60, 600)
    shutil.copytree(folder, spare := folder.with_name("spare"))
    num_refused = 0
    for _ in range(num_forged):
        forged = _mutated(draw, good)
        try:
            _write(folder, forged | {"format": good["format"]})
        except (ValueError, UnicodeEncodeError):
            continue  # JSON cannot hold it
        target = evenly_sharded(LocalCommunicator(), some_tensors)
        try:
            checkpoint.load(folder, target)
        except UserError:
            num_refused += 1
            assert target.loaded == {}
            assert checkpoint.verify(folder)
        except KeyError:  # of other tensors than the target's, which a strategy says in its own words
            names = {(each["name"], each["kind"]) for each in forged["tensors"]}
            assert names != set(some_tensors), forged
        else:
            for key, tensor in some_tensors.items():
                assert torch.equal(target.loaded[key].view(tensor.shape), tensor), (key, forged)
            checkpoint.consolidate(folder)
        for words in (["verify", folder], ["show", folder], ["ls", folder.parent], ["diff", spare, folder]):
            assert main(["checkpoint", *map(str, words)]) in (0, ExitStatus.USAGE, ExitStatus.CHECK_FAILED)
        assert "Traceback" not in capsys.readouterr().err
    assert num_refused > num_forged // 2
