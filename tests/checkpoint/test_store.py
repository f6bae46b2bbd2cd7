import pytest
import torch
import xxhash
from safetensors.torch import load_file

from zeroshard.checkpoint import store


def _fill(path, text):
    folder = store.begin(path)
    (folder / "manifest.json").write_text(text)
    return folder


def test_a_written_file_is_plain_safetensors_and_its_hash_is_true(tmp_path):
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


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "step-1"
    _fill(path, "new")
    assert store.resolve(path) is None
    store.commit(path)
    assert store.resolve(path) == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def test_what_an_interrupted_save_left_is_cleared_by_the_next(tmp_path):
    path = tmp_path / "step-1"
    (_fill(path, "killed") / "rank-00000-of-00001.safetensors").write_text("half")
    assert list(store.begin(path).iterdir()) == []


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
            patch.setattr(store, "_flush_folder", killing(store._flush_folder))
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
