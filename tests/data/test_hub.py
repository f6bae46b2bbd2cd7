"""Data sets of the hub and files at addresses, from a server on this machine: the same code as for the real ones."""

import os
import socket
import sys

import pytest

import forked
import small_tables as made
from web import serve
from zeroshard.data import files as files_module
from zeroshard.data.hub import HubName, open_hub, parse_hub_name
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.registry import SourceRequest, SyntheticSize, is_hub_name
from zeroshard.host.errors import UserError


def files(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.bin")}


@pytest.fixture
def site(tmp_path):
    """A hub with a data set of three files, which are also files of a plain server."""
    data = tmp_path / "site" / "org" / "name" / "data"
    data.mkdir(parents=True)
    for number in range(3):
        path = data / f"train-{number:05d}-of-00003.parquet"
        made.write_table(path, made.documents(300, seed=number), group=100)
    (tmp_path / "site" / "org" / "name" / "README.md").write_text("---\nlicense: mit\n---\n")
    with serve(tmp_path / "site") as site:
        yield site


def zeroshard(endpoint: str, tmp_path, *words: str):
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
    command = [sys.executable, "-m", "zeroshard", "prepare", *words]
    done = forked.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    return done.returncode, done.stdout, done.stderr


def test_a_data_set_of_the_hub_gives_the_bytes_of_its_files(site, tmp_path):
    words = ("--data", "org/name", "--data.dir", str(tmp_path / "hub"), "--data.workers", "1")
    status, out, err = zeroshard(site.address, tmp_path, *words)
    assert status == 0
    assert all("tok/s" in line for line in err.splitlines())  # how far it is, on a slow machine
    assert out.startswith(f"tokens in {tmp_path / 'hub'}: ")
    local = DataSpec("text", (str(site.folder / "org" / "name"),))
    assert files(tmp_path / "hub") == files(prepare(local, tmp_path / "local", num_workers=1))
    site.asked.clear()  # prepared once, it is used without a question
    assert zeroshard(site.address, tmp_path, *words)[0] == 0
    assert site.asked == []


@pytest.mark.redundant(but=["org/name@test-org/name has no split 'test'; it has train; write ...@SPLIT"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("org/nothing", "the hub shows no data set org/nothing"),
        ("org/name@test", "org/name has no split 'test'; it has train; write ...@SPLIT"),
    ],
)
def test_what_the_hub_has_not_is_one_line(site, tmp_path, name, line):
    status, out, err = zeroshard(site.address, tmp_path, "--data", name, "--data.dir", str(tmp_path / "out"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: data.source: ")
    assert line in err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def no_loader(monkeypatch):
    """The loaders of `datasets`, which would try for half a minute, are not asked."""
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **kwargs: asked.append(args))
    yield
    assert not asked


@pytest.mark.redundant
def test_a_hub_that_says_nothing_is_not_waited_for(tmp_path, monkeypatch, no_loader):
    from huggingface_hub import constants

    from zeroshard.data import hub

    assert hub.ANSWER_S == files_module.ANSWER_S <= 10
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    monkeypatch.setattr(files_module, "ANSWER_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes calls and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=r"data\.source: .*openwebtext cannot be had from .* \(no answer in time\)"):
            open_hub(SourceRequest("openwebtext", (), SyntheticSize(256, 1, 0)))
        with pytest.raises(UserError, match=r"data\.path: http.*a\.jsonl cannot be had \(no answer in time\)"):
            files_module.facts_of(f"{constants.ENDPOINT}/a.jsonl")


def test_offline_on_purpose_is_said_at_once(monkeypatch):
    import datasets.config  # noqa: F401 -- it takes over, when it is imported and for good, what is changed here
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="is on the Hugging Face hub, and HF_HUB_OFFLINE is set"):
        open_hub(SourceRequest("openwebtext", (), SyntheticSize(256, 1, 0)))


@pytest.mark.redundant(but=["jsonl.zst"])
@pytest.mark.parametrize("kind", made.KINDS)
def test_files_at_an_address_give_the_bytes_of_local_ones(site, tmp_path, kind):
    made.write_table(site.folder / f"a.{kind}", made.documents(500))
    away = DataSpec("text", (f"{site.address}/files/a.{kind}",))
    here = DataSpec("text", (str(site.folder / f"a.{kind}"),))
    assert files(prepare(away, tmp_path / "away", num_workers=1)) == files(prepare(here, tmp_path / "here"))


def test_a_server_that_stumbles_once_is_asked_again(site, tmp_path, monkeypatch):
    from zeroshard.data.encode import Encoder

    monkeypatch.setattr(files_module, "RETRIES_S", (0.01, 0.01))
    made.write_table(site.folder / "a.jsonl", made.documents(500))
    tables = made.tables_of(site.folder / "a.jsonl")
    spec = DataSpec("text", (f"{site.address}/files/a.jsonl",))
    made_part = Encoder._of_part
    tries = []

    def stumble(self, part):
        tries.append(part.index)
        if len(tries) == 1:
            raise ConnectionResetError("gone")
        return made_part(self, part)

    monkeypatch.setattr(Encoder, "_of_part", stumble)
    out = prepare(spec, tmp_path / "out", num_workers=1)
    assert len(tries) == len(list(tables.parts())) + 1
    assert files(out) == files(prepare(DataSpec("text", (tables.files[0].path,)), tmp_path / "here"))


def test_a_server_that_stays_away_is_one_line_and_what_was_done_stays(site, tmp_path, monkeypatch):
    from zeroshard.data.encode import Encoder

    monkeypatch.setattr(files_module, "RETRIES_S", (0.01,))
    made.write_table(site.folder / "a.jsonl", made.documents(500))

    def gone(self, part):
        raise ConnectionResetError("gone")

    monkeypatch.setattr(Encoder, "_of_part", gone)
    with pytest.raises(UserError, match=r"data: .*a\.jsonl failed \(gone\); run the same command again"):
        prepare(DataSpec("text", (f"{site.address}/files/a.jsonl",)), tmp_path / "out", num_workers=1)
    assert (tmp_path / ".out.partial" / "plan.json").exists()


def test_an_address_without_a_file_is_one_line(site, tmp_path):
    with pytest.raises(UserError, match=r"data\.path: http.*nothing\.parquet cannot be had \(404 "):
        prepare(DataSpec("text", (f"{site.address}/files/nothing.parquet",)), tmp_path / "out")
    with pytest.raises(UserError, match=r"data\.path: http.*a\.txt is none of \.parquet"):
        prepare(DataSpec("text", (f"{site.address}/files/a.txt",)), tmp_path / "out")


def test_names_of_the_hub():
    assert parse_hub_name("fineweb-edu") == HubName("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert parse_hub_name("hf:wikitext:wikitext-2@test") == HubName("wikitext", "wikitext-2", "test")
    assert parse_hub_name("a/b") == HubName("a/b")
    assert [is_hub_name(name) for name in ("a/b", "hf:a", "openwebtext", "text", "a/b/c")] == [True] * 3 + [False] * 2
    with pytest.raises(UserError, match="names no data set"):
        parse_hub_name("hf:")
