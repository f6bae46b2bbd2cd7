import pytest
import torch

from nets import Net
from zeroshard import checkpoint
from zeroshard.checkpoint import store
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.zero import Zero


def _save(path, evenly_sharded, tensors, world_size, **kwargs):
    run_threads(lambda comm: checkpoint.save(path, evenly_sharded(comm, tensors), **kwargs), world_size)


@pytest.mark.redundant
@pytest.mark.parametrize("saved_at", [1, 2, 3])
@pytest.mark.parametrize("loaded_at", [1, 2, 4])
def test_what_any_world_saved_any_world_loads_to_the_bit(tmp_path, evenly_sharded, some_tensors, saved_at, loaded_at):
    path = tmp_path / "step-00000011"
    _save(path, evenly_sharded, some_tensors, saved_at, step=11, extra={"note": "é", "list": [1, 2.5, None]})

    def load(comm):
        target = evenly_sharded(comm, some_tensors)
        assert checkpoint.load(path, target) == {"note": "é", "list": [1, 2.5, None], "step": 11}
        return target.loaded

    pieces = run_threads(load, loaded_at)
    for key, whole in some_tensors.items():
        assert torch.equal(torch.cat([loaded[key] for loaded in pieces]), whole.reshape(-1)), key
        assert pieces[0][key].dtype == whole.dtype
    files = sorted(entry.name for entry in path.iterdir())
    expected = [f"rank-{rank:05d}-of-{saved_at:05d}.safetensors" for rank in range(saved_at)]
    assert files == ["manifest.json", *expected]


def test_the_reader_tells_kinds_and_shapes_and_reads_slices_alone(tmp_path, evenly_sharded, some_tensors):
    _save(tmp_path / "c", evenly_sharded, some_tensors, 3, step=0)
    with checkpoint.CheckpointReader(*checkpoint.open_manifest(tmp_path / "c")) as reader:
        assert reader.kinds("block.weight") == {"param": (7, 3), "exp_avg": (7, 3), "step": ()}
        assert reader.kinds("unknown") == {}
        assert set(reader.names()) == {"block.weight", "half", "count", "mask", "empty"}
        weight = some_tensors["block.weight", "param"].reshape(-1)
        for start in range(22):
            for stop in range(start, 22):
                assert torch.equal(reader.read("block.weight", "param", (start, stop)), weight[start:stop])
        with pytest.raises(ValueError, match=r"elements \[21, 22\) were not saved"):
            reader.read("block.weight", "param", (20, 22))


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_the_old_one_stays(
    tmp_path, evenly_sharded, some_tensors, monkeypatch
):
    path = tmp_path / "c"
    _save(path, evenly_sharded, some_tensors, 2, step=1)
    write = store.write_tensors

    def full_disk(file, *args):
        if file.name.startswith("rank-00001"):
            raise OSError(28, "No space left on device")
        return write(file, *args)

    monkeypatch.setattr(store, "write_tensors", full_disk)

    def save(comm):
        with pytest.raises(OSError, match=r"No space left on device" + ("$" if comm.rank else r" \(rank 1, writing\)")):
            checkpoint.save(path, evenly_sharded(comm, some_tensors), step=2)

    run_threads(save, 2)
    assert checkpoint.read_manifest(path).step == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]  # what was written is freed


def test_pieces_that_leave_a_gap_are_never_called_a_checkpoint(tmp_path, evenly_sharded, some_tensors):
    class Forgetful(evenly_sharded):
        def named_shards(self):
            return list(super().named_shards())[: 2 if self.comm.rank else None]

    def save(comm):
        with pytest.raises((ValueError, OSError), match=r"is not tiled"):
            checkpoint.save(tmp_path / "c", Forgetful(comm, some_tensors), step=1)

    run_threads(save, 2)
    assert checkpoint.latest(tmp_path) is None
    assert not (tmp_path / "c").exists()


def test_names_that_no_load_would_take_are_never_called_a_checkpoint(tmp_path, evenly_sharded, some_tensors):
    class Tied(evenly_sharded):
        def tied_names(self):
            return {"half": "block.weight"}  # and it is saved itself

    def save(comm):
        with pytest.raises((ValueError, OSError), match=r"half cannot be another name of block\.weight"):
            checkpoint.save(tmp_path / "c", Tied(comm, some_tensors), step=1)

    run_threads(save, 2)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, True])
def test_a_step_that_no_load_would_take_is_refused_before_anything_is_written(
    tmp_path, evenly_sharded, some_tensors, step
):
    with pytest.raises(ValueError, match=r"^step: .* is not a whole number from 0 on; give the number of optimizer"):
        _save(tmp_path / "c", evenly_sharded, some_tensors, 2, step=step)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_save_in_other_folders_are_told_of_the_path_on_every_rank(tmp_path, evenly_sharded, some_tensors):
    def save(comm):
        path = tmp_path / f"of-rank-{comm.rank}" / "step-1"
        with pytest.raises(OSError, match=r"rank 1 does not find .*of-rank-1.*; give every rank the same path"):
            checkpoint.save(path, evenly_sharded(comm, some_tensors), step=1)
        with pytest.raises(ValueError, match="the checkpoint"):  # a step that one rank alone refuses
            checkpoint.save(tmp_path / f"step-{comm.rank:08d}", evenly_sharded(comm, some_tensors), step=0)

    run_threads(save, 2)
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_extra_with_another_step_is_refused(tmp_path, evenly_sharded, some_tensors):
    with pytest.raises(ValueError, match="extra: its step, 5, is not the step 3 of the save; rename the key"):
        _save(tmp_path / "c", evenly_sharded, some_tensors, 1, step=3, extra={"step": 5})
    _save(tmp_path / "c", evenly_sharded, some_tensors, 1, step=3, extra={"step": 3})


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_load_that_fails_for_the_last_tensor_has_changed_none(tmp_path, stage):
    def on_rank(comm):
        first, other = Net(), Net()
        other.more = torch.nn.Linear(2, 2)
        checkpoint.save(tmp_path / "c", Zero(first, stage, comm=comm), step=0)
        with torch.no_grad():
            for param in other.parameters():
                param.add_(1.0)
        zero = Zero(other, stage, comm=comm)
        before = zero.state_dict()
        with pytest.raises(UserError, match=r"saved with shape|the checkpoint has no param of it"):
            checkpoint.load(tmp_path / "c", zero)
        return all(torch.equal(value, before[name]) for name, value in zero.state_dict().items())

    assert all(run_threads(on_rank, 2))


class WithBuffer(Net):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("rotation", torch.arange(4).to(dtype))


def test_a_complex_buffer_is_saved_and_loaded(tmp_path):
    def go(comm):
        zero = Zero(WithBuffer(torch.complex64), 2, comm=comm)
        zero.model.rotation.mul_(2 - 1j)
        checkpoint.save(tmp_path / "c", zero, step=1)
        again = Zero(WithBuffer(torch.complex64), 3, comm=comm)
        checkpoint.load(tmp_path / "c", again)
        return again.model.rotation

    assert all(torch.equal(found, torch.arange(4) * (2 - 1j)) for found in run_threads(go, 2))
    assert not checkpoint.verify(tmp_path / "c")


def test_a_dtype_that_no_checkpoint_holds_is_refused_on_every_rank_and_nothing_is_left(tmp_path):
    def go(comm):
        zero = Zero(WithBuffer(torch.complex128), 2, comm=comm)
        with pytest.raises(ValueError, match=r"rotation.*: a checkpoint cannot hold torch.complex128; .*persistent"):
            checkpoint.save(tmp_path / "c", zero, step=1)

    run_threads(go, 2)
    assert not list(tmp_path.iterdir())
