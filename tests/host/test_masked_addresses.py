"""Passwords and tokens in addresses are shown, saved and logged nowhere, and decide nothing about the data."""

import json
from pathlib import Path

import pytest

import small_tables as made
from web import serve
from zeroshard.cli import main
from zeroshard.data.meta import read_meta
from zeroshard.data.spec import DataSpec, data_dir
from zeroshard.host.errors import UserError, warn
from zeroshard.host.masked_addresses import is_masked, masked
from zeroshard.lab.run_folders import read_run
from zeroshard.train.config.data_section import DataConfig, flags_for_secrets

TINY = (
    "--device cpu --seq-len 16 --micro-batch-size 2 --warmup-steps 0 --eval-rows 2 --model gpt2-demo --model.n-layer 1 "
    "--model.n-embd 8 --model.n-head 2 --model.seq-len 16 --track tensorboard --out run"
)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://host:80/a/x.jsonl", None),
        ("http://user:pw@host:80/x.jsonl?token=T&v=2#part", "http://***@host:80/x.jsonl?token=***&v=***#***"),
        (
            "see (https://u:p@h/x?signed); and 'https://h/y?a=b'; again",
            "see (https://***@h/x?***); and 'https://h/y?a=***'; again",
        ),
        ("{'path': ['http://h/x?a=it's', 'mine.txt']}", "{'path': ['http://h/x?a=***', 'mine.txt']}"),
        ("http://user:pa/s#s@host/x", "http://***@host/x"),
        ("http://user:p@ss@host/x", "http://***@host/x"),
        ("s3://KEY:SECRET@bucket/x.parquet", "s3://***@bucket/x.parquet"),
        ("simplecache::http://u:p@h/x?t=1=2", "simplecache::http://***@h/x?t=***"),
        ("http://[::1]:80/x?a", "http://[::1]:80/x?***"),
        ("hf://datasets/owner/name@revision/x.parquet", None),
        ("http://host:8000/@user/x.jsonl", None),
    ],
)
def test_an_address_is_shown_without_its_secrets(given, shown):
    assert masked(given) == (shown or given)
    assert masked(masked(given)) == masked(given)
    assert is_masked(masked(given)) == ("***" in masked(given))
    assert not is_masked(given)


def test_whoever_says_something_masks_it(capsys):
    error = UserError("http://h/x?t=SECRET", "http://u:SECRET@h/ is wrong", "see 'http://h/x?SECRET'")
    warn("http://h/x?t=SECRET")
    assert "SECRET" not in f"{error} {error.field} {error.what} {error.todo} {capsys.readouterr().err}"


def test_the_folder_of_data_and_the_command_of_a_child_know_what_to_do_with_secrets(tmp_path):
    ways = [DataSpec("text", (f"http://u:{one[0]}@h/x.jsonl?token={one}",)) for one in ("a.b/c", "d", "***")]
    assert len({data_dir(spec) for spec in ways}) == 1
    assert data_dir(ways[0]).name.startswith("text-x-bytes-")
    data = DataConfig(source="text", path=("http://h/x.jsonl?t=S", "mine.jsonl"), val_path=("a=http://h/y.jsonl",))
    assert flags_for_secrets(data) == ["--data.path", "http://h/x.jsonl?t=S", "mine.jsonl"]
    assert data.model_dump()["path"] == ("http://h/x.jsonl?t=***", "mine.jsonl")


def leaks(folder: Path, *secrets: str) -> list[str]:
    """The files, by name or content, that have one of the secrets."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files for each in secrets if each in str(path) or each.encode() in path.read_bytes()]


def test_a_run_on_an_address_keeps_its_secrets_nowhere_and_goes_on_once_they_are_given_again(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("aiohttp")
    (tmp_path / "site").mkdir()
    made.write_table(tmp_path / "site" / "x.jsonl", made.documents(80))
    monkeypatch.setattr("zeroshard.data.files.RETRIES_S", (0.0,))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with serve(tmp_path / "site") as site:

        def train(*words: str) -> int:
            monkeypatch.setattr("sys.argv", ["zeroshard", "train", *words])
            return main(["train", *words])

        def address(token: str, password: str) -> str:
            site.token, site.password = token, password
            return site.address.replace("://", f"://user:{password}@") + f"/files/x.jsonl?token={token}"

        first, second = ("TOKEN1.a", "PASSWORD1"), ("TOKEN2.b", "PASSWORD2")
        paths = ["--data.path", address(*first), "--data.val-path", f"more={address(*first)}"]
        assert train(*TINY.split(), "--data", "text", *paths, "--max-steps", "2") == 0
        shown = address("***", "***").replace("user:", "")
        site.token, site.password = second
        assert train("--config", "run/config.toml", "--resume", "auto", "--max-steps", "3") == 2
        line = f"error: data.path: {shown} lacks its secrets, which are never saved; give the address again, by --data"
        said = "".join(capsys.readouterr())
        assert line in said
        again = [each.replace(first[0], second[0]).replace(first[1], second[1]) for each in paths]
        assert train("--config", "run/config.toml", *paths, "--resume", "auto", "--max-steps", "3") == 2  # refused: 401
        assert train("--config", "run/config.toml", *again, "--resume", "auto", "--max-steps", "3") == 0
        assert main(["prepare", "--data", "text", "--data.path", again[1], "--data.dir", "d"]) == 0
        site.token = "TOKEN3"
        assert main(["prepare", "--data", "text", "--data.path", again[1], "--data.dir", "e"]) == 2
    said += "".join(capsys.readouterr())
    assert not [each for each in (*first, *second) if each in said]
    assert leaks(tmp_path / "here", *first, *second) == []
    assert len(list(Path("data").iterdir())) == 1 + 1  # the text, and the further validation set
    assert read_meta(Path("d")).source.description == shown
    log = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert shown in log[0]["command"]
    for name in ("config.toml", "metrics.jsonl"):  # as earlier versions wrote them
        path = Path("run") / name
        path.write_text(path.read_text().replace("token=***", "token=TOKEN1.a").replace("***@", "user:PASSWORD1@"))
    assert leaks(Path("run"), *first) != []
    assert not [each for each in first if each in str(read_run("run"))]
