"""``zeroshard checkpoint``: what there is, what is in it, whether it is whole, what differs."""

import re
import shutil

import pytest
import torch

from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.comm import LocalCommunicator
from zeroshard.zero import NamedShard


@pytest.fixture(scope="module")
def both(tmp_path_factory, data_folder):
    """Two runs of two checkpoints each, made once; tests copy them before they damage them."""
    folder = tmp_path_factory.mktemp("runs")
    return [_train(folder / name, data_folder) for name in ("run", "other")]


def _train(folder, data_folder):
    words = {
        "--model.n-layer": "1", "--model.n-embd": "16", "--model.n-head": "2", "--data": "synthetic",
        "--data.dir": str(data_folder), "--data.max-tokens": "6000", "--strategy": "zero1", "--device": "cpu",
        "--seq-len": "16", "--micro-batch-size": "2", "--max-steps": "4", "--warmup-steps": "0", "--eval-interval": "0",
        "--eval-batches": "1", "--checkpoint-interval": "2", "--out": str(folder),
    }  # fmt: skip
    assert main(["train", *(word for pair in words.items() for word in pair)]) == 0
    return folder


@pytest.fixture
def run(both, tmp_path):
    return shutil.copytree(both[0], tmp_path / "run")


@pytest.fixture
def other(both, tmp_path):
    return shutil.copytree(both[1], tmp_path / "other")


def say(capsys, *words, status=0):
    """What a command prints, by line."""
    capsys.readouterr()
    assert main(["checkpoint", *map(str, words)]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


class State:
    """Whole tensors that a checkpoint can hold."""

    comm = LocalCommunicator()

    def __init__(self, **tensors):
        self.tensors = tensors

    def named_shards(self):
        for name, tensor in self.tensors.items():
            yield NamedShard(name, "param", tuple(tensor.shape), (0, tensor.numel()), tensor.reshape(-1))


def damage(folder):
    file = next(folder.glob("rank-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def test_ls_lists_the_newest_first_and_says_what_is_not_complete(run, capsys):
    (run / "checkpoints" / "step-00000009").mkdir()
    head, *rows = [re.split(r"  +", line) for line in say(capsys, "ls", run)]
    assert head == ["checkpoint", "step", "ranks", "strategy", "size", "state"]
    assert [row[0].rpartition("-")[2] for row in rows] == ["00000009", "00000004", "00000002"]
    assert rows[0][1:] == ["9", "incomplete"]
    for row, step in zip(rows[1:], "42", strict=True):
        assert row[1:4] == [step, "1", "zero1"]
        assert row[-1] == "complete"
    assert say(capsys, "ls", run / "checkpoints") == say(capsys, "ls", run)
    one = run / "checkpoints" / "step-00000004"
    assert len(say(capsys, "ls", one)) == 2


def test_ls_calls_nothing_complete_that_a_glance_shows_to_be_broken(run, capsys):
    four, two = (run / "checkpoints" / f"step-0000000{step}" for step in (4, 2))
    next(four.glob("rank-*")).unlink()
    (two / "manifest.json").write_text("{}")
    _, first, second = say(capsys, "ls", run)
    assert first.endswith("damaged: rank-00000-of-00001.safetensors is missing")
    assert "damaged" in second
    assert not second.endswith("complete")


def test_ls_of_a_folder_without_checkpoints_says_so(tmp_path, capsys):
    assert say(capsys, "ls", tmp_path) == [f"no checkpoints in {tmp_path}"]


def test_show_tells_what_the_newest_holds(run, capsys):
    lines = say(capsys, "show", run)
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in lines[: lines.index("")])
    assert facts["step"] == "4"
    assert facts["written by"] == "1 rank zero1"
    assert facts["model"] == "gpt2-demo"
    assert f"torch {torch.__version__}" in facts["versions"]
    assert facts["state"] == "complete"
    rows = [re.split(r"  +", line) for line in lines]
    # 256 x 16 embedding, 128 x 16 positions, one block of width 16, the last norm
    num_params = 256 * 16 + 128 * 16 + (4 * 16 + 16 * 48 + 48 + 16 * 16 + 16 + 16 * 64 + 64 + 64 * 16 + 16) + 32
    assert ["param", "16", f"{num_params:,}", f"{num_params * 4 / 1024:.1f}KiB"] in rows
    assert ["blocks.0.attn.c_attn.weight", "exp_avg", "F32", "48x16", "1"] in rows
    assert ["wte.weight", "step", "F32", "scalar", "1"] in rows


def test_verify_hashes_every_checkpoint_of_a_run_and_names_the_damaged_file(run, capsys):
    lines = say(capsys, "verify", run)
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == ["undamaged", "undamaged"]
    two = run / "checkpoints" / "step-00000002"
    file = damage(two)
    lines = say(capsys, "verify", run, status=3)
    assert len(lines) == 2
    assert lines[1].startswith(f"{file}: is damaged")
    assert say(capsys, "verify", two, status=3) == lines[1:]
    assert say(capsys, "verify", run / "checkpoints" / "step-00000004") == lines[:1]


def _put(source, place):
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place) if source.is_dir() else shutil.copyfile(source, place)


def _swap(one, another):
    aside = one.with_name("aside")
    one.rename(aside)
    another.rename(one)
    aside.rename(another)


def _link(source, place):
    shutil.rmtree(place)
    place.symlink_to(source)


FOUR, TWO, RANK = "checkpoints/step-00000004", "checkpoints/step-00000002", "rank-00000-of-00001.safetensors"
OF_FOUR, OF_RUN = "is of step 2, and the name step-00000004 of step 4", "is of run "
MISPLACED = {
    "an old one under the newest's name": (lambda a, b: _put(a / TWO, a / FOUR), OF_FOUR),
    "a copy under a later name": (lambda a, b: _put(a / FOUR, a / "checkpoints/step-00000008"), "of step 8"),
    "two that were swapped": (lambda a, b: _swap(a / TWO, a / FOUR), OF_FOUR),
    "one that was renamed": (lambda a, b: (a / FOUR).rename(a / "checkpoints/step-00000006"), "of step 6"),
    "a link to an old one": (lambda a, b: _link(a / TWO, a / FOUR), OF_FOUR),
    "another run's": (lambda a, b: _put(b / FOUR, a / FOUR), OF_RUN),
    "another run's beside it": (lambda a, b: _put(b / FOUR, a / "checkpoints/step-00000004.aside"), OF_RUN),
    "another run's of another step": (lambda a, b: _put(b / TWO, a / FOUR), OF_FOUR),
    "a link to another run's": (lambda a, b: _link(b / FOUR, a / FOUR), OF_RUN),
    "an old one's manifest": (lambda a, b: _put(a / TWO / "manifest.json", a / FOUR / "manifest.json"), OF_FOUR),
    "an old one's tensors": (lambda a, b: _put(a / TWO / RANK, a / FOUR / RANK), "does not match the manifest"),
    "another run's manifest": (lambda a, b: _put(b / FOUR / "manifest.json", a / FOUR / "manifest.json"), OF_RUN),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_what_lies_in_the_place_of_another_step_or_run_is_not_verified_and_not_loaded(run, other, capsys, name):
    damage, what = MISPLACED[name]
    damage(run, other)
    path = next((run / "checkpoints").glob("*.aside"), run)
    assert any(what in line for line in say(capsys, "verify", path, status=3))
    choice = checkpoint.newest_valid(LocalCommunicator(), run / "checkpoints")
    assert path.suffix == ".aside" or any(what in each.why for each in choice.passed_over)
    step = int(choice.path.name[-8:]) if choice.path else 0
    assert step == {"a copy under a later name": 4, "another run's beside it": 4, "two that were swapped": 0}.get(
        name, 2
    )


def test_copies_of_runs_and_of_their_checkpoints_are_verified_wherever_they_lie(run, tmp_path, capsys):
    (run / "run.lock").unlink()
    shutil.copytree(run / "checkpoints", tmp_path / "new" / "checkpoints")
    moved = tmp_path / "kept" / "step-00000004"
    shutil.copytree(run / FOUR, moved)
    (run / "checkpoints" / "run-id").unlink()  # as of an earlier version
    for path in (run, tmp_path / "new", moved):
        assert all("undamaged" in line for line in say(capsys, "verify", path))


def test_a_checkpoint_is_not_saved_under_the_name_of_another_step(tmp_path):
    with pytest.raises(ValueError, match=r"^path: the checkpoint is of step 4, .* of step 8; name it step-00000004$"):
        checkpoint.save(tmp_path / "step-00000008", State(), step=4)
    assert not any(tmp_path.iterdir())
    checkpoint.save(tmp_path / "step-8", State(), step=4)  # a name of one's own


def test_diff_of_a_checkpoint_with_itself_and_with_another(run, capsys, tmp_path):
    two, four = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    assert say(capsys, "diff", two, two) == ["no difference"]
    assert say(capsys, "diff", four, run) == ["no difference"]  # a run stands for its newest
    lines = say(capsys, "diff", two, four, status=3)
    assert lines[0] == "step: 2 and 4"
    assert "step of wte.weight: 1 of 1 elements differ, by 2 at the most" in lines
    assert any(line.startswith("param of wte.weight: ") for line in lines)
    assert any(re.fullmatch(r"param_groups\.0\.lr: [\d.e-]+ and [\d.e-]+", line) for line in lines)


def test_diff_sees_bits_that_numbers_hide_and_tensors_that_are_not_there(tmp_path, capsys):
    nan = float("nan")
    first = State(
        zero=torch.tensor([0.0, 1.0]), nan=torch.tensor([nan, 2.0]), mine=torch.ones(1), shape=torch.ones(2, 3)
    )
    second = State(
        zero=torch.tensor([-0.0, 1.0]), nan=torch.tensor([1.0, 2.0]), yours=torch.ones(1), shape=torch.ones(3, 2)
    )
    checkpoint.save(tmp_path / "a", first, step=1, extra={"x": [1, {"y": 2}], "z": 1})
    checkpoint.save(tmp_path / "b", second, step=1, extra={"x": [1, {"y": 3}]})
    assert say(capsys, "diff", tmp_path / "a", tmp_path / "b", status=3) == [
        "extra.x.1.y: 2 and 3",
        "extra.z: only in the first",
        "param of mine: only in the first",
        "param of nan: 1 of 2 elements differ, by nan at the most",
        "param of shape: F32 [2, 3] and F32 [3, 2]",
        "param of yours: only in the second",
        "param of zero: 1 of 2 elements differ, by 0 at the most",
    ]


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path, refusal):
    for word in ("show", "verify"):
        assert "is not a complete checkpoint" in refusal("checkpoint", word, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for word in ("show", "verify"):
        assert "has no complete checkpoint" in refusal("checkpoint", word, tmp_path)
