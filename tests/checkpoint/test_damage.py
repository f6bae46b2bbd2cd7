"""Any damage to any byte of a checkpoint is found before a weight changes, and the message names the file."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soak import examples
from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.checkpoint.manifest import Piece, TensorEntry, dump
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import UserError

NUM_CASES, NUM_PARTS = 600, examples(1, 17)  # with --soak 10,200 cases, in tests that stay within a test's time limit
RANKS = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")
FILES = (*RANKS, "manifest.json")
QUICK = settings(max_examples=NUM_CASES, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path, evenly_sharded, some_tensors, monkeypatch):
    """Checkpoints of two ranks: the good one of step 1, step 2, and ``other``, step 2 of a run with other values."""
    monkeypatch.setattr(store.os, "fsync", lambda descriptor: None)

    def save(name, tensors, step):
        run_threads(lambda comm: checkpoint.save(tmp_path / name, evenly_sharded(comm, tensors), step=step), 2)

    save("step-00000001", some_tensors, 1)
    save("step-00000002", some_tensors, 2)
    changed = {key: ~tensor if tensor.dtype == torch.bool else tensor + 1 for key, tensor in some_tensors.items()}
    save("other", changed, 2)
    return tmp_path


def regions_of(file: Path) -> list[tuple[int, int]]:
    """The classes of bytes of a file: header length, header, padding and each piece; or the manifest's quarters."""
    size = file.stat().st_size
    if file.suffix == ".json":
        return [(size * part // 4, size * (part + 1) // 4) for part in range(4)]
    manifest = checkpoint.read_manifest(file.parent)
    cuts = [
        (region.offset, region.offset + region.num_bytes) for region in manifest.regions() if region.file == file.name
    ]
    return [(0, 8), (8, cuts[0][1] - 8), (cuts[0][1] - 8, cuts[0][1]), *cuts[1:]]


@st.composite
def damages(draw, folder: Path) -> tuple[str, bytes | None]:
    """A file of a checkpoint and what it holds after some damage; None where it is gone."""
    file = draw(st.sampled_from(FILES))
    whole = (folder / "step-00000002" / file).read_bytes()
    start, stop = draw(st.sampled_from(regions_of(folder / "step-00000002" / file)))
    position = draw(st.integers(start, stop - 1))
    kind = draw(st.sampled_from(["truncate", "flip", "delete", "swap", "foreign", "append", "zero", "exchange"]))
    if kind == "truncate":
        content = whole[:position]
    elif kind == "flip":
        content = whole[:position] + bytes([whole[position] ^ (1 << draw(st.integers(0, 7)))]) + whole[position + 1 :]
    elif kind == "append":
        content = whole + draw(st.binary(min_size=1, max_size=9))
    elif kind == "zero":  # a stretch that never reached the disk
        length = draw(st.integers(1, stop - position))
        content = whole[:position] + bytes(length) + whole[position + length :]
    elif kind == "exchange":  # two bytes in each other's place
        other = draw(st.integers(0, len(whole) - 1))
        content = bytearray(whole)
        content[position], content[other] = content[other], content[position]
    elif kind == "swap":  # with another rank's
        content = (folder / "step-00000002" / RANKS[file != RANKS[1]]).read_bytes()
    elif kind == "foreign":  # from another run
        content = (folder / "other" / file).read_bytes()
    else:
        content = None
    return file, None if content is None else bytes(content)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_any_damage_is_found_before_a_weight_changes_and_auto_falls_back(folder, evenly_sharded, some_tensors, part):
    path, spare = folder / "step-00000002", folder / "spare"
    shutil.copytree(path, spare)
    comm, seen = LocalCommunicator(), set()

    @QUICK
    @given(st.data())
    def damage_one(data):
        file, content = data.draw(damages(folder))
        whole = (spare / file).read_bytes()
        if content == whole:
            return
        if content is None:
            (path / file).unlink()
        else:
            (path / file).write_bytes(content)
        try:
            target = evenly_sharded(comm, some_tensors)
            # A manifest of another run beside our files is whole in itself: then files are named.
            named = RANKS if file == "manifest.json" and content not in (None, whole) else ()
            with pytest.raises(UserError) as refused:
                checkpoint.load(path, target)
            assert target.loaded == {}
            if not (file == "manifest.json" and content is None):  # without it there is no checkpoint
                assert any(name in str(refused.value) for name in (file, *named)), refused.value
                (first, *_) = checkpoint.verify(path)
                assert first.file.name in (file, *named)
            choice = checkpoint.newest_valid(comm, folder)
            assert choice.path == folder / "step-00000001"
            assert [passed_over.path for passed_over in choice.passed_over] == [path]
            seen.add(file)
        finally:
            (path / file).write_bytes(whole)

    damage_one()
    assert seen == set(FILES)
    assert checkpoint.verify(path) == ()


@pytest.mark.parametrize("file", RANKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_hears_of_damage_that_one_has_found(folder, evenly_sharded, some_tensors, file, world_size):
    damaged = folder / "step-00000002" / file
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    def load(comm):
        target = evenly_sharded(comm, some_tensors)
        with pytest.raises(UserError) as refused:
            checkpoint.load(folder / "step-00000002", target)
        assert target.loaded == {}
        choice = checkpoint.newest_valid(comm, folder)
        return str(refused.value), choice

    answers = run_threads(load, world_size)
    assert len(set(answers)) == 1
    line, choice = answers[0]
    assert file in line
    assert "does not match the manifest" in line
    assert choice.path == folder / "step-00000001"
    assert choice.passed_over[0].complete


def test_a_checkpoint_that_was_never_completed_is_passed_over_and_told_from_a_damaged_one(folder):
    (folder / "step-00000002" / "manifest.json").unlink()
    (folder / ".step-00000003.tmp").mkdir()
    choice = checkpoint.newest_valid(LocalCommunicator(), folder)
    assert choice.path == folder / "step-00000001"
    assert [(each.path.name, each.complete) for each in choice.passed_over] == [
        ("step-00000003", False),
        ("step-00000002", False),
    ]
    assert "never completed" in choice.passed_over[0].why


def test_without_a_good_checkpoint_there_is_none_to_choose(folder):
    assert checkpoint.newest_valid(LocalCommunicator(), folder / "nowhere").path is None
    for step in (1, 2):
        (folder / f"step-{step:08d}" / RANKS[0]).unlink()
    choice = checkpoint.newest_valid(LocalCommunicator(), folder)
    assert choice.path is None
    assert [each.why.endswith("is missing") for each in choice.passed_over] == [True, True]


def test_verify_tells_of_every_damaged_file_and_piece(folder):
    path = folder / "step-00000002"
    (path / RANKS[1]).unlink()
    body = bytearray((path / RANKS[0]).read_bytes())
    body[8] ^= 1
    body[-1] ^= 1
    (path / RANKS[0]).write_bytes(body)
    found = checkpoint.verify(path)
    assert [damage.file.name for damage in found] == [RANKS[0], RANKS[0], RANKS[1]]
    assert "its header" in found[0].what
    assert "of" in found[1].what
    assert found[2].what == "is missing"


def test_a_manifest_that_claims_a_petabyte_is_refused_before_any_memory_is_taken(folder, evenly_sharded, some_tensors):
    path, numel = folder / "step-00000002", 2**48
    true = checkpoint.read_manifest(path)
    header = true.files[RANKS[0]].header_bytes
    piece = Piece((0, numel), RANKS[0], "param:half:0", header, "0" * 32)
    false = replace(
        true,
        files={RANKS[0]: replace(true.files[RANKS[0]], num_bytes=header + 4 * numel)},
        tensors=(TensorEntry("half", "param", "F32", (numel,), (piece,)),),
    )
    (path / "manifest.json").write_text(dump(false))
    target = evenly_sharded(LocalCommunicator(), {("half", "param"): torch.empty(numel, device="meta")})
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**30, limits[1]))
    try:
        for verified in (False, True):
            with pytest.raises(UserError, match=f"{RANKS[0]}.* is damaged: it has"):
                checkpoint.load(path, target, verified=verified)
        assert checkpoint.newest_valid(LocalCommunicator(), folder).path == folder / "step-00000001"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
