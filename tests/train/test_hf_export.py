"""What ``zeroshard export`` writes; tests/integrations opens it with transformers."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from zeroshard import checkpoint
from zeroshard.cli import main
from zeroshard.comm import LocalCommunicator
from zeroshard.integrations import hf_export
from zeroshard.train.start import run_training
from zeroshard.zero import NamedShard


@pytest.fixture
def run(tiny_config, tmp_path):
    """A run on synthetic tokens, which are no text, with an average."""
    run_training(tiny_config(max_steps=2, warmup_steps=0, eval_interval=0, checkpoint_interval=1, ema_decay=0.5))
    return tmp_path / "run"


@pytest.mark.redundant
def test_a_run_is_its_newest_checkpoint_and_an_older_one_can_be_named(run, tmp_path, capsys):
    one, two = (run / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    for name, source in (("newest", run), ("two", two), ("one", one)):
        assert main(["export", str(source), str(tmp_path / name)]) == 0
    assert "step 1 of" in capsys.readouterr().out.splitlines()[-1]
    newest, second, first = (load_file(tmp_path / name / "model.safetensors") for name in ("newest", "two", "one"))
    assert all(torch.equal(newest[key], tensor) for key, tensor in second.items())
    assert not torch.equal(newest["transformer.wte.weight"], first["transformer.wte.weight"])
    saved = checkpoint.consolidate(two)["model"]
    assert torch.equal(newest["transformer.h.1.mlp.c_fc.weight"], saved["blocks.1.mlp.c_fc.weight"].t())
    assert "lm_head.weight" not in newest
    assert sorted(file.name for file in (tmp_path / "newest").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.redundant
def test_the_average_can_be_exported(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "hf"), "--weights", "ema"]) == 0
    average = checkpoint.consolidate(run / "checkpoints" / "step-00000002")["ema"]
    assert torch.equal(
        load_file(tmp_path / "hf" / "model.safetensors")["transformer.wte.weight"], average["wte.weight"]
    )


@pytest.mark.redundant
def test_an_index_says_where_each_tensor_is(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "hf"), "--max-shard-size", "10KB"]) == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("hf/model-*.safetensors"))
    assert len(files) > 2
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(file).values())


@pytest.mark.redundant
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(run, tmp_path, refusal):
    out = tmp_path / "hf"
    assert "there is no folder" in refusal("export", tmp_path / "nothing", out)
    assert "max_shard_size: '5' is not a size" in refusal("export", run, out, "--max-shard-size", "5")
    assert "dtype: 'int8' is not a choice" in refusal("export", run, out, "--dtype", "int8")
    assert "out: is missing" in refusal("export", run)
    assert "out: " in refusal("export", run, run)
    file = next((run / "checkpoints" / "step-00000002").glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file}: is damaged" in refusal("export", run, out)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_that_does_not_say_its_model_is_refused(tmp_path, refusal):
    class State:
        comm = LocalCommunicator()

        def named_shards(self):
            yield NamedShard("weight", "param", (2,), (0, 2), torch.ones(2))

    checkpoint.save(tmp_path / "c", State(), step=0)
    assert "does not say which model it is" in refusal("export", tmp_path / "c", tmp_path / "hf")
    checkpoint.save(tmp_path / "d", State(), step=0, extra={"config": {"model": "gpt2-demo"}})
    assert "d has wte.weight as None, its configuration as" in refusal("export", tmp_path / "d", tmp_path / "hf")
    assert "holds no moving average" in refusal("export", tmp_path / "d", tmp_path / "hf", "--weights", "ema")


def test_a_full_disk_is_one_line_with_a_status_of_its_own_and_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    def full(path, tensors, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hf_export, "write_streamed", full)
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "hf")]) == 5
    line = (
        f"error: {tmp_path / 'hf'}: it was not written (No space left on device); free space, or name another folder\n"
    )
    assert capsys.readouterr() == ("", line)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
