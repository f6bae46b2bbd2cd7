import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import forked
import small_tables as made
from zeroshard.data import tables
from zeroshard.data.meta import read_meta
from zeroshard.data.prepare import DataSpec, Progress, prepare
from zeroshard.data.split import validates
from zeroshard.data.tokenizer import load_tokenizer
from zeroshard.data.tokens import TokenDataset, verify
from zeroshard.host.errors import UserError

# A process of its own, with parts small enough that a small set has many. It counts what it does to files, prints how
# many that were, and kills itself at the one that it is told.
PREPARE = """
import os, signal, sys
from pathlib import Path
from zeroshard.data import tables
tables.PART_BYTES = 2000
import zeroshard.data.prepare as module
module.SAVE_BYTES = 2000
from zeroshard.data.prepare import DataSpec, prepare
num_events = 0

def count(event, args):
    global num_events
    if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "shutil.rmtree"):
        num_events += f".{Path(sys.argv[2]).name}.partial" in str(args[0])
        if num_events == int(sys.argv[5]):
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    spec = DataSpec("text", (sys.argv[1],), sys.argv[4])
    if sys.argv[5:]:
        sys.addaudithook(count)
    prepare(spec, Path(sys.argv[2]), shard_tokens=7001, num_workers=int(sys.argv[3]))
    print(num_events)
"""


def files(folder):
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(tables, "PART_BYTES", 2000)


@pytest.fixture
def folder(tmp_path):
    """A set of several files and kinds."""
    (tmp_path / "set").mkdir()
    for number, kind in enumerate(made.KINDS):
        made.write_table(tmp_path / "set" / f"{number}.{kind}", made.documents(400, seed=number))
    return tmp_path / "set"


@pytest.mark.redundant
def test_documents_keep_their_order_and_end_and_some_validate(folder, tmp_path, small_parts):
    out = prepare(DataSpec("text", (str(folder),), "bpe:280"), tmp_path / "out", num_workers=1)
    assert verify(out) == ()
    tokenizer = load_tokenizer(out)
    everything = [text for number in range(4) for text in made.documents(400, seed=number)]
    splits = {}
    for split in ("train", "val"):
        ids = TokenDataset.open(out, split)
        text = tokenizer.decode(ids.window(0, ids.num_tokens))
        splits[split] = text.split("<|endoftext|>")
        assert splits[split].pop() == ""
    assert sorted(splits["train"] + splits["val"]) == sorted(everything)
    places = [everything.index(text) for text in splits["train"]]
    assert places == sorted(places)
    assert splits["val"] == [text for text in everything if validates((text,), 0.1)]
    meta = read_meta(out)
    assert meta.source.num_documents == 1600
    assert meta.eos_id == tokenizer.eos_id
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.redundant
def test_the_bytes_do_not_depend_on_the_number_of_workers(folder, tmp_path):
    spec = DataSpec("text", (str(folder),), max_tokens=30_000)
    ours = [files(prepare(spec, tmp_path / str(num), shard_tokens=9000, num_workers=num)) for num in (1, 3)]
    assert ours[0] == ours[1]
    assert TokenDataset.open(tmp_path / "1").num_tokens == 27_000


def test_a_run_that_is_killed_again_and_again_ends_with_the_bytes_of_one_that_was_not(folder, tmp_path):
    def start(out, killed_at=-1):
        command = [sys.executable, "-c", PREPARE, str(folder), str(out), "1", "bpe:300", str(killed_at)]
        return forked.run(command, stdout=subprocess.PIPE, text=True)

    whole = start(tmp_path / "whole")
    assert whole.returncode == 0
    num_events, draw = int(whole.stdout), random.Random(7)
    assert num_events > 40
    for _ in range(4):
        assert start(tmp_path / "killed", draw.randint(1, num_events // 4)).returncode == -signal.SIGKILL
    assert start(tmp_path / "killed").returncode == 0
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".*partial"))


class _StopError(Exception):
    pass


def stop_after(count):
    """A function that stops a preparation as its ``count``-th progress is told; ``calls`` are all that were."""

    def told(told):
        told_of.calls.append(told)
        if len(told_of.calls) == count:
            raise _StopError

    told_of = told
    told_of.calls = []
    return told_of


@pytest.mark.redundant(but=["9"])
@pytest.mark.parametrize("after", [1, 9, 55])
def test_what_was_written_is_gone_on_with_and_what_grew_beyond_is_cut_back(
    folder, tmp_path, small_parts, monkeypatch, after
):
    monkeypatch.setattr("zeroshard.data.prepare.SAVE_BYTES", 8000)
    spec, out = DataSpec("text", (str(folder),), max_tokens=60_000 if after == 9 else 0), tmp_path / "out"
    stop, num_parts = stop_after(after), len(list(made.tables_of(*sorted(folder.iterdir())).parts()))
    whole = files(prepare(spec, tmp_path / "whole", shard_tokens=3000, num_workers=1))
    with pytest.raises(_StopError):
        prepare(spec, out, shard_tokens=3000, num_workers=1, on_progress=stop)
    for path in sorted((tmp_path / ".out.partial" / "draft" / "train").iterdir())[-1:]:
        for name in (path.name, "tokens-99999.bin"):
            with path.with_name(name).open("ab") as file:
                file.write(b"torn")
    assert files(prepare(spec, out, shard_tokens=3000, num_workers=1, on_progress=stop)) == whole
    if after > 20:  # of what was saved nothing is done again
        assert len(stop.calls) - after < num_parts
    assert not list(tmp_path.glob(".*partial"))


def test_a_limit_that_was_reached_before_an_interruption_is_not_passed(folder, tmp_path, small_parts, monkeypatch):
    spec = DataSpec("text", (str(folder),), max_tokens=30_000)
    whole = files(prepare(spec, tmp_path / "whole", num_workers=1))
    with monkeypatch.context() as patch:
        patch.setattr("zeroshard.data.tokens.TokenWriter.finish", lambda self: stop_after(1)(None))
        with pytest.raises(_StopError):
            prepare(spec, tmp_path / "out", num_workers=1)
    monkeypatch.setattr("zeroshard.data.encode.Encoder.__call__", None)  # no part is read again
    assert files(prepare(spec, tmp_path / "out", num_workers=1)) == whole


def test_begun_work_that_is_damaged_or_of_something_else_is_told_in_a_line(folder, tmp_path, small_parts, monkeypatch):
    monkeypatch.setattr("zeroshard.data.prepare.SAVE_BYTES", 0)
    spec, out, work = DataSpec("text", (str(folder),)), tmp_path / "out", tmp_path / ".out.partial"
    with pytest.raises(_StopError):
        prepare(spec, out, num_workers=1, on_progress=stop_after(20))
    other = DataSpec("text", (str(folder),), val_fraction=0.2)
    with pytest.raises(UserError, match=r"unfinished work with other settings: val_fraction 0\.1 where 0\.2 is asked"):
        prepare(other, out, num_workers=1)
    begun = files(work)
    cases = {"draft/train/tokens-00000.bin": ["lost"]}
    damaged = ["{", "[]", "[" * 100_000, '{"next_part": "x"}', '{"a": 1}']
    cases |= {"plan.json": damaged, "state.json": damaged}
    line = r"^data\.dir: .*(is damaged|unfinished work with other settings|lost what was written).*; .*delete"
    for name, contents in cases.items():
        for content in contents:
            for each, kept in begun.items():  # an error of the user's removes the folder
                (work / each).parent.mkdir(parents=True, exist_ok=True)
                (work / each).write_bytes(kept)
            (work / name).write_text(content)
            with pytest.raises(UserError, match=line):
                prepare(spec, out, num_workers=1)
            (work / name).unlink(missing_ok=True)


def test_the_second_of_two_waits_for_the_first_and_takes_its_work(folder, tmp_path, capsys):
    spec, out, second = DataSpec("text", (str(folder),)), tmp_path / "deep" / "out", []

    def begin_another(told):
        if not second:
            second.append(threading.Thread(target=lambda: second.append(prepare(spec, out, num_workers=1))))
            second[0].start()
            while "waiting for it" not in capsys.readouterr().err:
                time.sleep(0.01)

    prepare(spec, out, num_workers=1, on_progress=begin_another)
    second[0].join()
    assert second[1] == out
    assert [each.name for each in out.parent.iterdir()] == ["out"]
    assert verify(out) == ()


def test_what_is_in_the_way_is_not_replaced(folder, tmp_path):
    def put(told):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine.txt").write_text("mine")

    with pytest.raises(OSError, match="not empty"):
        prepare(DataSpec("text", (str(folder),)), tmp_path / "out", num_workers=1, on_progress=put)
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_preparing_again_reads_no_text(folder, tmp_path, monkeypatch):
    spec = DataSpec("text", (str(folder),))
    out = prepare(spec, tmp_path / "out", num_workers=1)
    monkeypatch.setattr("zeroshard.data.prepare.work_folder", None)
    assert prepare(spec, out) == out
    with (folder / "1.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match="was prepared with another text"):
        prepare(spec, out)


def test_progress_ends_at_one(folder, tmp_path, small_parts):
    told: list[Progress] = []
    out = prepare(DataSpec("text", (str(folder),)), tmp_path / "out", num_workers=1, on_progress=told.append)
    assert [each.fraction for each in told] == sorted(each.fraction for each in told)
    assert told[-1].fraction == 1.0
    assert told[-1].num_tokens == sum(split.num_tokens for split in read_meta(out).splits.values())
    assert told[-1].left_s == 0.0
    assert Progress(100, 0.25, 10.0).left_s == 30.0


@pytest.mark.parametrize("kind", made.KINDS)
def test_of_a_table_of_few_documents_the_end_of_each_validates(tmp_path, kind):
    path = made.write_table(tmp_path / f"a.{kind}", [f"{name}1\n{name}2\n{name}3\n" for name in "xyz"])
    out = prepare(DataSpec("text", (str(path),), val_fraction=0.34), tmp_path / "out", num_workers=1)
    sides = [TokenDataset.open(out, split) for split in ("train", "val")]
    texts = [bytes(side.window(0, side.num_tokens).astype(np.uint8)) for side in sides]
    assert texts == [b"x1\ny1\nz1\n", b"x2\nx3\ny2\ny3\nz2\nz3\n"]
    assert read_meta(out).spec["split"] == "tails-1"
