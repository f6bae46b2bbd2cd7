"""A run folder from elsewhere may have links in it: nothing outside is written, or published, through them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from forged_manifests import CHECKPOINT, DATA, OURS, TRAIN, make_run
from zeroshard.cli import main
from zeroshard.host.regular_files import copy_inside, folder_inside, link_in, open_inside, write_inside

PRECIOUS = b"the user's own\n"
# Everything that a run may leave in its folder: an average, the stacks of a hang, a trace, files of states, a tracker.
EVERYTHING = (
    "--step-timeout-s 60 --profile.trace-steps 1 --offload disk --track tensorboard --max-steps 4 --resume auto"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("made"))
    for name in ("stacks", "offload", "wandb"):
        (folder / "run" / name).mkdir(exist_ok=True)
    for name in ("tracker-id", "fit.json", "stacks/rank-00000.txt"):
        (folder / "run" / name).write_text("")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of the folder of `make_run`, with a file and a folder outside of the run; it is the current one."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(PRECIOUS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _replaced_by_a_link(path, folder):
    is_folder = path.is_dir()
    if is_folder:
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    path.symlink_to(folder / "precious" if is_folder else folder / "precious" / "file")


def _everything_but_the_run(folder):
    return {
        str(path.relative_to(folder)): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
        if "run" not in path.relative_to(folder).parts[:1]
    }


OPENED = (
    *("run.lock", "config.toml", "metrics.jsonl", "summary.json", "tracker-id", "fit.json"),
    *("tokenizer", "tokenizer/meta.json", "checkpoints", "stacks", "stacks/rank-00000.txt", "offload", "wandb"),
)


@pytest.mark.redundant(but=["wandb"])
@pytest.mark.parametrize("name", OPENED)
def test_a_run_is_refused_in_whose_folder_a_link_stands_for_what_it_opens(folder, refusal, name):
    _replaced_by_a_link(folder / "run" / name, folder)
    before = _everything_but_the_run(folder)
    line = refusal(*f"train {TRAIN} {OURS} {DATA} --out run {EVERYTHING}".split())
    assert f"run/{name} is a symbolic link" in line or "run cannot be written (it is a symbolic link)" in line
    assert _everything_but_the_run(folder) == before


APPENDED = ("run.lock", "metrics.jsonl", "stacks/rank-00000.txt")


def test_no_writer_opens_a_link_that_comes_to_the_folder_after_the_check(folder, monkeypatch):
    """A run with everything goes on where files that it writes anew are links, and ends where others are."""
    monkeypatch.setattr("zeroshard.train.setup.run_folder._require_no_links", lambda folder: None)
    words = f"train {TRAIN} {OURS} {DATA} --out run {EVERYTHING}".split()
    assert main(words) == 0
    left = [path for path in Path("run").rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    names = {str(path.relative_to("run")) for path in left}
    anew = ("config.toml", "summary.json", "tokenizer/meta.json", "trace/rank-00000.json", "checkpoints/run-id")
    assert {*anew[:-1], *APPENDED} <= names | {APPENDED[-1]}
    shutil.copytree("run", "kept")
    for name in anew:
        _replaced_by_a_link(Path("run", name), folder)
    before = _everything_but_the_run(folder)
    assert main([*words, "--max-steps", "8"]) == 0
    assert not any(Path("run", name).is_symlink() for name in anew)
    for name in (*APPENDED, "tokenizer", "stacks", "trace", "checkpoints"):
        shutil.rmtree("run")
        shutil.copytree("kept", "run")
        _replaced_by_a_link(Path("run", name), folder)
        assert main([*words, "--max-steps", "8"]) == (2 if name == "run.lock" else 5), name
    assert _everything_but_the_run(folder) == before


@pytest.mark.redundant
def test_the_folder_of_a_run_may_be_a_link_itself(folder):
    (folder / "run").rename(folder / "elsewhere")
    (folder / "run").symlink_to("elsewhere")
    assert main(f"train {TRAIN} {OURS} {DATA} --out run --resume auto".split()) == 0
    assert json.loads((folder / "elsewhere" / "summary.json").read_text())["step"] == 2


@pytest.mark.redundant(but=[".step-00000002.tmp"])
@pytest.mark.parametrize("name", ["step-00000001", ".step-00000002.tmp"])
def test_a_link_in_the_place_of_a_checkpoint_is_deleted_and_not_what_it_leads_to(folder, name):
    shutil.copytree(f"run/{CHECKPOINT}", "precious/step-00000001")
    _replaced_by_a_link(Path("run", CHECKPOINT), folder)
    Path("run", CHECKPOINT).unlink()
    Path("run/checkpoints", name).symlink_to(folder / "precious" / "step-00000001")
    before = _everything_but_the_run(folder)
    assert main(f"train {TRAIN} {OURS} {DATA} --out run --resume auto --keep-checkpoints 1".split()) == 0
    assert _everything_but_the_run(folder) == before
    assert sorted(os.listdir("run/checkpoints")) == ["run-id", "step-00000002"]


@pytest.mark.parametrize("name", ["tokenizer/chat_template.jinja", "tokenizer/meta.json", "hugging-face"])
def test_a_file_outside_is_not_published_by_an_export(folder, refusal, name):
    _replaced_by_a_link(folder / "run" / name, folder)
    assert f"run/{name} is a symbolic link" in refusal("export", "run", "new")
    assert not Path("new").exists()


def test_files_inside_a_folder_are_opened_through_no_link(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    (outside / "file").write_bytes(PRECIOUS)
    write_inside(folder, "a/b/file", "text")
    assert (tmp_path / "real/a/b/file").read_text() == "text"
    (folder / "link").symlink_to(outside)
    (folder / "a" / "file").symlink_to(outside / "file")
    for work in (
        lambda: write_inside(folder, "link/file", "x"),
        lambda: folder_inside(folder, "link/new"),
        lambda: open_inside(folder, "link/file"),
        lambda: open_inside(folder, "a/file", os.O_WRONLY | os.O_TRUNC),
        lambda: copy_inside(folder / "a" / "file", outside, follow=False),
    ):
        with pytest.raises(OSError, match=f"it is a symbolic link: '{tmp_path}/folder/"):
            work()
    write_inside(folder, "a/file", b"new")  # takes the link's place
    assert (tmp_path / "real/a/file").read_text() == "new"
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"file": PRECIOUS}
    assert sorted(os.listdir(folder / "a")) == ["b", "file"]  # no draft is left
    assert link_in(folder / "a") is None
    assert link_in(folder / "link") == folder / "link"
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/folder/no'"):
        open_inside(folder, "no/file")
    with pytest.raises(AssertionError, match="leads out of"):
        write_inside(folder, "a/../../outside/file", "x")
