import os
import re
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.comm import LocalCommunicator


def _fill(path, text):
    folder = store.begin(path)
    (folder / "manifest.json").write_text(text)
    return folder


@pytest.mark.parametrize("chunk_bytes", [store.CHUNK_BYTES, 48])
def test_a_written_file_is_plain_safetensors_and_its_hash_is_true(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(store, "CHUNK_BYTES", chunk_bytes)
    flat = torch.randn(100)
    tensors = {
        "a": flat[:37],
        "b": flat[37:90],  # views of one buffer: no copy, no complaint
        "scalar": torch.tensor([3], dtype=torch.int64),
        "half": torch.randn(5).to(torch.bfloat16),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0),
        "strided": torch.arange(10.0)[::2],
    }
    path = tmp_path / "x.safetensors"
    sizes = []
    written = store.write_tensors(path, tensors, sizes.append)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor)
    content = path.read_bytes()
    entry = written.file
    assert entry.num_bytes == len(content)
    assert entry.header_xxh128 == xxhash.xxh3_128(content[: entry.header_bytes]).hexdigest()
    assert sum(sizes) == entry.num_bytes - entry.header_bytes
    for key, tensor in tensors.items():
        offset, digest = written.pieces[key]
        piece = content[offset : offset + tensor.numel() * tensor.element_size()]
        assert piece == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert digest == xxhash.xxh3_128(piece).hexdigest()


def test_tensors_begin_where_any_dtype_is_aligned(tmp_path):
    for num_letters in range(1, 9):
        written = store.write_tensors(tmp_path / "x", {"k" * num_letters: torch.zeros(2)})
        assert written.file.header_bytes % 8 == 0


def test_a_file_is_flushed_while_it_is_written_and_each_flush_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FLUSH_BYTES", 400)
    sizes = []
    store.write_tensors(tmp_path / "x.safetensors", {name: torch.zeros(100) for name in "abc"}, sizes.append)
    assert sorted(sizes) == [0, 0, 0, 400, 400, 400]


def test_a_flush_that_fails_fails_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FLUSH_BYTES", 400)
    flush, failures = os.fsync, [OSError(5, "Input/output error")]  # the kernel tells it once

    def fsync(descriptor):
        if failures:
            raise failures.pop()
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        store.write_tensors(tmp_path / "x.safetensors", {name: torch.zeros(100) for name in "ab"})


def test_a_save_killed_at_any_rename_leaves_one_whole_checkpoint(tmp_path, monkeypatch):
    """Kill `commit` before each of its steps, over an old checkpoint of the same name."""
    path = tmp_path / "step-1"
    for killed_at in range(5):
        _fill(path, "old")
        store.commit(path)
        _fill(path, "new")
        calls = 0

        def killing(original, killed_at=killed_at):
            def step(*args):
                nonlocal calls
                calls += 1
                if calls > killed_at:
                    raise KeyboardInterrupt
                return original(*args)

            return step

        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.rename", killing(type(path).rename))
            patch.setattr(store, "remove", killing(store.remove))
            patch.setattr(store, "flush", killing(store.flush))
            with pytest.raises(KeyboardInterrupt):
                store.commit(path)
        found = store.resolve(path)
        assert found is not None, f"killed at {killed_at}"
        assert (found / "manifest.json").read_text() in ("old", "new")
        survivor = (found / "manifest.json").read_text()
        store.begin(path)  # the next save heals the name
        assert (path / "manifest.json").read_text() == survivor
        assert store.resolve(path) == path
        assert not (tmp_path / ".step-1.old").exists()


def test_all_of_a_checkpoint_is_on_the_disk_before_it_takes_its_name(
    tmp_path, monkeypatch, evenly_sharded, some_tensors
):
    """Else a machine that loses its power may come back to a complete checkpoint full of zeros."""
    events, flushed = [], {}
    fsync, rename = os.fsync, Path.rename

    def noting_fsync(descriptor):
        facts = os.fstat(descriptor)
        here = (tmp_path, *tmp_path.rglob("*"))
        name = str(next(path.relative_to(tmp_path) for path in here if os.path.samestat(path.stat(), facts)))
        name = re.sub(r"/\.(.+)\.[0-9a-f]{8}\.tmp$", r"/\1", name)  # the draft of a text
        events.append(f"flush {name}")
        flushed[Path(name).name] = facts.st_size
        fsync(descriptor)

    def noting_rename(path, target):
        events.append(f"rename {path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    for steps_aside in ([], ["rename step-1 to .step-1.old"]):
        events.clear()
        checkpoint.save(tmp_path / "step-1", evenly_sharded(LocalCommunicator(), some_tensors), step=1)
        assert events == [
            "flush .step-1.tmp/rank-00000-of-00001.safetensors",
            "flush .step-1.tmp/rank-00000.json",
            "flush .step-1.tmp/manifest.json",
            "flush .step-1.tmp",
            *steps_aside,
            "rename .step-1.tmp to step-1",
            "flush .",
        ]
        assert {path.name: path.stat().st_size for path in (tmp_path / "step-1").iterdir()}.items() <= flushed.items()
