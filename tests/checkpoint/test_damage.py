"""Any damage to any byte of a checkpoint is found before a weight changes, and the message names the file."""

import resource
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.checkpoint.manifest import Piece, TensorEntry, dump
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import UserError

RANKS = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")
FILES = (*RANKS, "manifest.json")


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


DAMAGES = {
    "cut off": lambda whole, at: whole[:at],
    "a bit is flipped": lambda whole, at: whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :],
    "two bytes are exchanged": lambda whole, at: (
        whole[: at - 1] + whole[at : at + 1] + whole[at - 1 : at] + whole[at + 1 :]
    ),
    "a stretch never reached the disk": lambda whole, at: whole[: at - 3] + bytes(4) + whole[at + 1 :],
    "bytes were appended": lambda whole, at: whole + whole[at : at + 9],
    "it is gone": lambda whole, at: None,
    "another rank's": lambda whole, at: OTHER_RANK,
    "another run's": lambda whole, at: OTHER_RUN,
}
OTHER_RANK, OTHER_RUN = b"rank", b"run"  # stand for what the test reads there


@pytest.mark.redundant
@pytest.mark.parametrize("kind", DAMAGES)
def test_any_damage_is_found_before_a_weight_changes_and_auto_falls_back(folder, evenly_sharded, some_tensors, kind):
    """In the middle of every region of every file."""
    path, comm, num_damaged = folder / "step-00000002", LocalCommunicator(), 0
    places = [(file, (start + stop) // 2) for file in FILES for start, stop in regions_of(path / file)]
    for file, at in places:
        whole = (path / file).read_bytes()
        content = DAMAGES[kind](whole, at)
        if content is OTHER_RANK:
            content = (path / RANKS[file != RANKS[1]]).read_bytes()
        elif content is OTHER_RUN:
            content = (folder / "other" / file).read_bytes()
        if content is None:
            (path / file).unlink()
        else:
            (path / file).write_bytes(content)
        if content != whole:
            num_damaged += 1
            target = evenly_sharded(comm, some_tensors)
            # A manifest of another run beside our files is whole in itself: then files are named.
            named = (file, *(RANKS if kind == "another run's" else ()))
            with pytest.raises(UserError) as refused:
                checkpoint.load(path, target)
            assert target.loaded == {}
            if not (file == "manifest.json" and content is None):  # without it there is no checkpoint
                assert any(name in str(refused.value) for name in named), refused.value
                assert checkpoint.verify(path)[0].file.name in named
            choice = checkpoint.newest_valid(comm, folder)
            assert choice.path == folder / "step-00000001"
            assert [passed_over.path for passed_over in choice.passed_over] == [path]
        (path / file).write_bytes(whole)
    assert num_damaged > len(FILES)
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
