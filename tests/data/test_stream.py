import base64
import threading
from collections import Counter

import pytest
import torch

import small_tables as made
from zeroshard.comm import run_threads
from zeroshard.comm.agree import gather_bytes
from zeroshard.data import lanes as lanes_module
from zeroshard.data import stream as module
from zeroshard.data import tables as tables_module
from zeroshard.data.joining import document_ids
from zeroshard.data.lanes import NUM_LANES, open_stream
from zeroshard.data.split import validates
from zeroshard.data.stream import StreamBatches, validation_tokens
from zeroshard.data.tables import PartReader
from zeroshard.data.tokenizer import ByteTokenizer
from zeroshard.host.errors import UserError

T = 32


def global_batch(ranks, step, grad_accum_steps):
    """All rows of a step in order, [G, T] each, from every rank of a world without a gather."""
    micro = [batches(step, micro_step) for micro_step in range(grad_accum_steps) for batches in ranks]
    tokens, targets = zip(*micro, strict=True)
    return torch.cat(tokens), torch.cat(targets)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Parts and turns as small as the corpora here: a turn has two documents of each lane, and grows to some eight."""
    monkeypatch.setattr(tables_module, "PART_BYTES", 2000)
    monkeypatch.setattr(module, "FIRST_BYTES", 100)
    monkeypatch.setattr(module, "MOST_BYTES", 400)


@pytest.fixture
def texts(tmp_path):
    """Some forty parts of two files."""
    paths = [
        made.write_table(tmp_path / f"{i}.{kind}", made.documents(500, seed=i))
        for i, kind in enumerate(("parquet", "jsonl"))
    ]
    return open_stream(made.tables_of(*paths), ByteTokenizer(), "bytes", 0.1)


@pytest.fixture
def stream(texts):
    """`stream(world_size=..., micro=..., accum=...)`: every rank's batches."""
    opened = []

    def make(world_size=1, micro=2, accum=8, seed=3, text=texts, seq_len=T, **more):
        shapes = {"seq_len": seq_len, "micro_batch_size": micro, "grad_accum_steps": accum, "seed": seed}
        ranks = [StreamBatches(text, rank=rank, world_size=world_size, **shapes, **more) for rank in range(world_size)]
        opened.extend(ranks)
        return ranks

    yield make
    for each in opened:
        each.close()


def documents_of(text, split):
    """The ids of every document of a split, by content."""
    reader, found = PartReader(text.column), Counter()
    for part in text.parts:
        for each in reader.texts(part):
            if validates((each,), text.holdout.val_fraction) == (split == "val"):
                found[tuple(document_ids(text.tokenizer, each).tolist())] += 1
    reader.close()
    return found


@pytest.mark.redundant(but=["1-16-1"])
@pytest.mark.parametrize(("world_size", "micro", "accum"), [(2, 2, 4), (4, 4, 1), (8, 1, 2), (1, 16, 1)])
def test_a_step_has_the_same_rows_in_the_same_order_at_any_world_size(stream, world_size, micro, accum):
    one = stream()
    many = stream(world_size, micro, accum)
    for step in (0, 1, 7, 20):
        assert all(map(torch.equal, global_batch(many, step, accum), global_batch(one, step, 8)))


@pytest.mark.redundant(but=["2"])
@pytest.mark.parametrize("world_size", [2, 3, 20])
def test_ranks_that_share_the_work_have_the_rows_of_one_that_does_it_alone(stream, texts, world_size):
    """Also where there are more ranks than lanes."""
    alone = global_batch(stream(world_size, 1, 1), 5, 1)

    def rank_main(comm):
        ours = StreamBatches(
            texts,
            seq_len=T,
            micro_batch_size=1,
            rank=comm.rank,
            world_size=world_size,
            seed=3,
            gather=lambda mine: gather_bytes(comm, mine),
        )
        try:
            return [ours(step, 0) for step in range(6)][-1]
        finally:
            ours.close()

    found = run_threads(rank_main, world_size)
    assert torch.equal(torch.cat([tokens for tokens, _ in found]), alone[0])
    assert torch.equal(torch.cat([targets for _, targets in found]), alone[1])


@pytest.mark.redundant(but=["2"])
@pytest.mark.parametrize("world_size", [1, 2, 20])
def test_each_document_is_encoded_once_in_a_world(texts, world_size, monkeypatch):
    encoded, lock, of_document = Counter(), threading.Lock(), lanes_module.document_ids

    def count(tokenizer, text):
        with lock:
            encoded[text] += 1
        return of_document(tokenizer, text)

    monkeypatch.setattr(lanes_module, "document_ids", count)

    def rank_main(comm):
        def gather(mine):
            return gather_bytes(comm, mine)

        shapes = {"seq_len": T, "micro_batch_size": 1, "rank": comm.rank, "world_size": world_size}
        batches = StreamBatches(texts, **shapes, gather=gather)
        for step in range(700 // world_size):
            batches(step, 0)
        batches.close()

    run_threads(rank_main, world_size)
    assert max(encoded.values()) == 1
    assert sum(encoded.values()) > 250


@pytest.mark.redundant
@pytest.mark.parametrize(("num_parts", "rows_a_step"), [(1, 1), (3, 7), (50, 48)])
def test_an_epoch_has_each_row_once(tmp_path, stream, monkeypatch, num_parts, rows_a_step):
    """Each document is as long as a row, so that an epoch's rows are its documents, but for the last."""
    texts = [f"{i:0{T - 1}d}" for i in range(300)]
    path = made.write_table(tmp_path / "a.parquet", texts, group=-(-300 // num_parts))
    monkeypatch.setattr(tables_module, "PART_BYTES", 1)  # a row group each
    text = open_stream(made.tables_of(path), ByteTokenizer(), "bytes", 0.1)
    assert len(text.parts) == num_parts
    (batches,) = stream(1, 1, rows_a_step, text=text)
    wanted = {int(each) for each in texts if not validates((each,), 0.1)}
    num_rows = len(wanted) - 1
    rows = [
        int(bytes(batches(step, micro)[0][0].tolist()))
        for step in range(-(-2 * num_rows // rows_a_step))
        for micro in range(rows_a_step)
    ]
    epochs = [rows[:num_rows], rows[num_rows : 2 * num_rows]]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert len(set(epoch)) == num_rows
        assert len(wanted - set(epoch)) == 1
        assert set(epoch) < wanted


@pytest.mark.redundant(but=["17-1-2-8"])
@pytest.mark.pairwise("at")
@pytest.mark.parametrize(("world_size", "micro", "accum"), [(1, 2, 8), (4, 2, 2)])
@pytest.mark.parametrize("at", [17, 40])
def test_batches_after_a_resume_are_those_of_the_undisturbed_run(stream, world_size, micro, accum, at):
    undisturbed = stream()
    wanted = [global_batch(undisturbed, step, 8) for step in range(at)]
    saved = undisturbed[0].position(at)
    wanted += [global_batch(undisturbed, step, 8) for step in range(at, at + 8)]
    for known in (saved, None):
        resumed = stream(world_size, micro, accum)
        for each in resumed:
            each.restore_position(known, at)
        for step in range(at, at + 8):
            assert all(map(torch.equal, global_batch(resumed, step, accum), wanted[step]))


def test_a_run_that_goes_on_encodes_no_more_than_its_turn_and_the_next(stream, monkeypatch):
    (first,) = stream()
    for step in range(30):
        first(step, 0)
    saved, encoded = first.position(30), []
    first.close()
    first._lanes._pool.shutdown(wait=True)
    of_document = lanes_module.document_ids
    monkeypatch.setattr(lanes_module, "document_ids", lambda *args: (encoded.append(1), of_document(*args))[1])
    (resumed,) = stream()
    resumed.restore_position(saved, 30)
    resumed(30, 0)
    resumed.close()
    resumed._lanes._pool.shutdown(wait=True)
    assert 0 < len(encoded) < 3 * NUM_LANES * 400 / 40


def test_a_run_that_goes_on_with_another_batch_takes_the_rows_that_follow(stream):
    whole, resumed = stream(1, 1, 1)[0], stream(1, 1, 3)[0]
    (sixteen,) = stream(1, 16, 1)
    sixteen(4, 0)
    resumed.restore_position(sixteen.position(5), 5)
    for step in (5, 6, 7):
        for micro in range(3):
            row = 5 * 16 + (step - 5) * 3 + micro
            assert torch.equal(resumed(step, micro)[0], whole(row, 0)[0])
    with pytest.raises(ValueError, match="step 4 is before step 5"):
        resumed(4, 0)


def test_a_run_that_goes_on_with_other_rows_begins_with_its_turn(stream):
    first, again = stream(1, 16, 1)[0], stream(1, 16, 1, seq_len=T // 2)[0]
    first(9, 0)
    saved = first.position(10)
    again.restore_position(saved, 10)
    assert again.position(10)["row"] == saved["first_row"]
    assert again(10, 0)[0].shape == (16, T // 2)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": 9}, r"seed: the checkpoint's stream was shuffled with seed 9, not 3; use --seed 9"),
        ({"places": [[0, 0]]}, r"resume: the checkpoint's place in the stream cannot be read \(it contradicts itself"),
        ({"left_over": "?"}, r"resume: .*cannot be read"),
        ({"row": -5}, r"resume: .*cannot be read \(row: Input should be greater"),
        ({"row": 0, "first_row": 1}, r"resume: .*contradicts itself"),
        ({"epoch": 2**40}, r"resume: .*cannot be read \(epoch: "),
        ({"places": [[2**30, 0]] + [None] * 15}, r"resume: .*contradicts itself, or the text"),
        ({"left_over": base64.b64encode(b"\xff" * 8).decode()}, r"resume: .*contradicts itself, or the text"),
        ({"turn": "x"}, r"resume: .*cannot be read"),
    ],
)
def test_a_place_that_is_none_is_refused(stream, change, line):
    (batches,) = stream()
    batches(2, 0)
    with pytest.raises(UserError, match=line):
        stream()[0].restore_position(batches.position(3) | change, 3)


def test_a_row_beyond_its_turn_is_refused_once_the_turn_is_read(stream):
    (batches,) = stream()
    batches(2, 0)
    (again,) = stream()
    again.restore_position(batches.position(3) | {"row": 2**30}, 3)
    with pytest.raises(UserError, match=r"resume: .*its row is beyond its turn"):
        again(3, 0)


def test_an_earlier_step_is_read_again(stream):
    (batches,) = stream()
    wanted = [batches(step, 0)[0] for step in range(40)]
    assert torch.equal(batches(3, 0)[0], wanted[3])
    assert torch.equal(batches(39, 0)[0], wanted[39])


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_validates_in_a_stream_is_what_validates_when_it_is_prepared(texts, world_size):
    def rank_main(comm):
        return [
            validation_tokens(texts, num, comm.rank, world_size, lambda mine: gather_bytes(comm, mine))
            for num in (700, 10**9)
        ]

    wanted = documents_of(texts, "val")
    for some, every in run_threads(rank_main, world_size):
        parts = bytes(every.window(0, every.num_tokens).tolist()).split(b"\n")
        assert Counter(tuple(part + b"\n") for part in parts[:-1]) == wanted
        assert 700 <= some.num_tokens < every.num_tokens
        assert some.window(0, 700).tolist() == every.window(0, 700).tolist()


def test_a_failure_of_one_rank_is_told_by_all(texts, tmp_path):
    (tmp_path / "1.jsonl").write_text("nothing\n" * 3000)

    def rank_main(comm):
        shapes = {"seq_len": T, "micro_batch_size": 1, "rank": comm.rank, "world_size": 3}
        batches = StreamBatches(texts, **shapes, gather=lambda mine: gather_bytes(comm, mine))
        try:
            with pytest.raises(UserError, match=r"data\.path: the line at byte"):
                batches(0, 0)
        finally:
            batches.close()
        return True

    assert run_threads(rank_main, 3) == [True] * 3


def test_a_tiny_file_streams_too_and_one_without_a_row_is_a_line(tmp_path, stream):
    text = open_stream(
        made.tables_of(made.write_table(tmp_path / "a.jsonl", ["some words\n" * 9])), ByteTokenizer(), "bytes", 0.1
    )
    assert text.holdout.rule == "tails-1"
    (batches,) = stream(text=text)
    seen = {bytes(row.tolist()) for step in range(3) for row in global_batch([batches], step, 8)[0]}
    assert len(seen) == (8 * 11 - 1) // T
    empty = open_stream(made.tables_of(made.write_table(tmp_path / "b.jsonl", ["words\n" * 2])), ByteTokenizer(), "", 0)
    with pytest.raises(UserError, match="data: the text that trains has 12 tokens, and a row takes 33; use more text"):
        stream(text=empty)[0](0, 0)


def test_what_can_only_be_read_from_its_beginning_is_refused(tmp_path):
    packed = made.tables_of(made.write_table(tmp_path / "a.jsonl.gz", ["one"]))
    with pytest.raises(UserError, match=r"data\.streaming: .*a\.jsonl\.gz can only be read from its beginning"):
        open_stream(packed, ByteTokenizer(), "bytes", 0.1)


def test_no_thread_and_no_file_stays_behind(stream):
    (batches,) = stream()
    batches(0, 0)
    batches.close()
    batches._lanes._pool.shutdown(wait=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stream")]
    assert not batches._lanes._lanes
