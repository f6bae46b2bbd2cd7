"""A named pipe or a device in a file's place: every command says so in a line; none waits or reads for ever."""

import os

import pytest
import torch

from run_folders import write_run
from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.comm import LocalCommunicator
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.lab.run_folders import read_run
from zeroshard.optim.named_shards import NamedShard

PIPE = "it is a named pipe, not a file"
DEVICE = "it is a device, not a file"
RANK_FILE = "rank-00000-of-00001.safetensors"


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    return str(path)


@pytest.fixture
def one_line(capsys):
    """`one_line(words, status)`: what the command said on stderr, which is one line."""

    def run(words, status=ExitStatus.USAGE):
        assert main(words) == status
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


COMMANDS = {
    "train": ["train", "--config", "FILE", "--dry-run"],
    "prepare": ["prepare", "--config", "FILE"],
    "submit": ["submit", "train", "--config", "FILE"],
    "sweep": ["sweep", "--config", "FILE"],
    "import-config deepspeed": ["import-config", "deepspeed", "FILE"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_that_are_no_file_are_refused(one_line, pipe, command):
    for path, what in ((pipe, PIPE), ("/dev/zero", DEVICE)):
        line = one_line([path if word == "FILE" else word for word in COMMANDS[command]])
        assert path in line
        assert what in line


class Weights:
    comm = LocalCommunicator()

    def named_shards(self):
        yield NamedShard("w", "param", (5,), (0, 5), torch.arange(5.0))

    def load_named_shards(self, reader):
        raise AssertionError("nothing of a damaged checkpoint is loaded")


@pytest.mark.parametrize("in_its_place", ["pipe", "device"])
def test_a_checkpoint_with_a_pipe_for_a_file_is_damaged(one_line, capsys, tmp_path, in_its_place):
    path = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.save(path, Weights(), step=1)
    (path / RANK_FILE).unlink()
    if in_its_place == "pipe":
        os.mkfifo(path / RANK_FILE)
        what = PIPE
    else:
        (path / RANK_FILE).symlink_to("/dev/zero")
        what = DEVICE
    (damage,) = checkpoint.verify(path)
    assert str(damage) == f"{path / RANK_FILE}: cannot be read ({what})"
    with pytest.raises(UserError, match=what):
        checkpoint.load(path, Weights())
    with pytest.raises(UserError, match=what), checkpoint.CheckpointReader(*checkpoint.open_manifest(path)) as reader:
        reader.read("w", "param", (0, 5))
    with pytest.raises(UserError, match=what):
        checkpoint.consolidate(path)
    assert checkpoint.newest_valid(LocalCommunicator(), path.parent).path is None
    assert main(["checkpoint", "verify", str(path)]) == ExitStatus.CHECK_FAILED
    assert capsys.readouterr().out == f"{path / RANK_FILE}: cannot be read ({what})\n"
    assert what in one_line(["checkpoint", "diff", str(path), str(path)])


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json"])
def test_a_run_with_a_pipe_for_a_file_is_damaged_(tmp_path, name):
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad")
    (bad / name).unlink()
    os.mkfifo(bad / name)
    assert read_run(bad).problems == (f"{name}: cannot be read ({PIPE})",)
    assert read_run(good).problems == ()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_hugging_face_folder_with_a_pipe_for_a_file_is_refused(one_line, tmp_path, name):
    folder = tmp_path / "hf"
    folder.mkdir()
    facts = '{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 8}'
    (folder / "config.json").write_text(facts)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    line = one_line(["import", str(folder), str(tmp_path / "out")])
    assert "a named pipe" in line or "holds no" in line


@pytest.mark.parametrize("name", ["run.lock", "metrics.jsonl"])
def test_a_run_whose_log_or_lock_is_a_pipe_is_not_begun(tiny_config, tmp_path, capsys, name):
    from zeroshard.train.config.toml import dump_toml

    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    (tmp_path / "config.toml").write_text(dump_toml(tiny_config(strategy="zero0", max_steps=2, warmup_steps=0)))
    assert main(["train", "--config", str(tmp_path / "config.toml"), "--resume", "auto"]) != ExitStatus.OK
    assert PIPE in capsys.readouterr().err
