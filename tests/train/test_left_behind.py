"""What a command leaves behind that was refused or killed, and what it does with files that are not its own."""

import os
import shutil

import pytest

from forged_manifests import CHECKPOINT, DATA, OURS, TRAIN, make_run
from zeroshard.checkpoint import store
from zeroshard.cli import main


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of the folder of `make_run`, which is the current one."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


REFUSED = {
    "no such checkpoint": f"train {TRAIN} {OURS} {DATA} --out a/b/new --resume nowhere",
    "another model": f"train {TRAIN} --model gpt2-demo {DATA} --out a/b/new --resume run/{CHECKPOINT}",
    "another model, in the run": f"train {TRAIN} --model gpt2-demo {DATA} --out run --resume auto",
    "a batch that does not divide": f"train {TRAIN} {OURS} {DATA} --out new --global-batch-size 3",
    "data that are too short": f"train {TRAIN} {OURS} --data text --data.path text.txt --data.dir tokens --out new "
    "--seq-len 4000 --model.seq-len 4000",
    "no data": f"train {TRAIN} {OURS} --data text --data.path nothing.txt --data.dir made --out new",
    "a file for a folder": f"train {TRAIN} {OURS} {DATA} --out text.txt/new",
    "a run that is there": f"train {TRAIN} {OURS} {DATA} --out run",
    "weights of another model": f"train {TRAIN} --model llama-tiny {DATA} --out new --init-from run/{CHECKPOINT}",
    "rows of a table that are none": "prepare --data text --data.path broken.jsonl --data.dir made",
    "too few rows of a table": "prepare --data text --data.path short.jsonl --data.dir made --data.tokenizer bpe:9000",
    "a run that trains on such a table": f"train {TRAIN} {OURS} --data text --data.path broken.jsonl --data.dir made "
    "--out new",
    "an export over files": "export run tokens",
    "an export of nothing": "export tokens new",
    "an import of nothing": "import tokens new",
}


@pytest.mark.redundant(but=["an import of nothing", "no data", "weights of another model"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_nothing_behind(folder, name):
    (folder / "broken.jsonl").write_text('{"text": "a document"}\n' * 50 + "{\n")
    (folder / "short.jsonl").write_text('{"text": "a document"}\n')
    before = everything(folder)
    assert main(REFUSED[name].split()) == 2
    after = everything(folder)
    assert sorted(after.keys() - before.keys()) == []
    changed = [path for path in before if before[path] != after.get(path) and path != "run/run.lock"]
    assert changed == []  # the lock of the run's own folder counts its starts


@pytest.mark.parametrize("resume", ["auto", f"run/{CHECKPOINT}"])
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json"])
def test_files_of_another_program_are_not_written_over(folder, capsys, resume, name):
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / name).write_text("title = 'mine'\n")
    assert main(f"train {TRAIN} {OURS} {DATA} --out theirs --resume {resume}".split()) == 2
    assert f"error: out: theirs/{name} is there, and theirs holds no checkpoint" in capsys.readouterr().err
    assert everything(theirs) == {name: b"title = 'mine'\n"}


@pytest.mark.redundant
def test_runs_resume_that_have_a_lock_or_a_checkpoint_alone(folder):
    words = f"train {TRAIN} {OURS} {DATA} --out run --resume auto".split()
    os.remove("run/run.lock")  # as in a copy, or a run that was imported
    assert main(words) == 0
    shutil.rmtree("run/checkpoints")  # as after a kill before the first one
    assert main(words) == 0


def incomplete(path):
    path.mkdir(parents=True)
    (path / "rank-00000-of-00001.safetensors").write_bytes(b"left")


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("generate run --max-new-tokens 2", "step-00000009"),
        ("eval run --batches 1", ".step-00000009.tmp"),
        ("export run new", "step-00000009"),
        ("checkpoint show run", ".step-00000009.tmp"),
    ],
)
def test_a_newer_checkpoint_without_manifest_is_named_when_it_is_passed_over(folder, capsys, words, name):
    incomplete(folder / "run/checkpoints" / name)
    assert main(words.split()) == 0
    said = "warning: passed over run/checkpoints/step-00000009: it is not complete (no manifest.json)\n"
    assert capsys.readouterr().err.count(said) == 1
    shutil.rmtree(folder / "run/checkpoints" / name)
    shutil.rmtree("new", ignore_errors=True)
    assert main(words.split()) == 0
    assert "passed over" not in capsys.readouterr().err


def test_an_unfinished_save_of_a_step_makes_way_for_the_deletion_of_that_step(folder):
    path = folder / "run" / CHECKPOINT
    incomplete(store.temporary(path))
    store.remove_named(path)
    assert [each.name for each in path.parent.iterdir()] == ["run-id"]
