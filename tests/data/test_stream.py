import threading

import pytest
import torch

import small_tables as made
from zeroshard.data import tables as tables_module
from zeroshard.data.stream import BlockSizes, StreamBatches, blocks_of, global_batch, num_lanes
from zeroshard.data.tokenizer import ByteTokenizer
from zeroshard.errors import UserError

T = 32


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    """Some forty blocks of some sixty rows, of two files."""
    monkeypatch.setattr(tables_module, "PART_BYTES", 2000)
    paths = [
        made.write_table(tmp_path / f"{i}.{kind}", made.documents(500, seed=i))
        for i, kind in enumerate(("parquet", "jsonl"))
    ]
    return blocks_of(made.tables_of(*paths), ByteTokenizer(), "bytes", 0.1)


@pytest.fixture
def stream(blocks):
    """`stream(world_size=..., micro=..., accum=..., sizes=...)`: every rank's batches."""
    opened = []

    def make(world_size=1, micro=2, accum=8, sizes=None, seed=3):
        shapes = {"seq_len": T, "micro_batch_size": micro, "grad_accum_steps": accum, "seed": seed}
        ranks = [
            StreamBatches(blocks, sizes or BlockSizes(None, ""), rank=rank, world_size=world_size, **shapes)
            for rank in range(world_size)
        ]
        opened.extend(ranks)
        return ranks

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize(("world_size", "micro", "accum"), [(2, 2, 4), (4, 4, 1), (8, 1, 2), (1, 16, 1)])
def test_a_step_has_the_same_rows_at_any_world_size(stream, world_size, micro, accum):
    one = stream()
    many = stream(world_size, micro, accum)
    for step in (0, 1, 7, 40):
        assert all(map(torch.equal, global_batch(many, step, accum), global_batch(one, step, 8)))


@pytest.mark.parametrize(("world_size", "micro", "accum"), [(1, 2, 8), (4, 2, 2)])
@pytest.mark.parametrize("noted", [True, False])
def test_batches_after_a_resume_are_those_of_the_undisturbed_run(
    stream, tmp_path, blocks, world_size, micro, accum, noted
):
    notes = tmp_path / "notes"
    undisturbed = stream(sizes=BlockSizes(notes, blocks.identity))
    wanted = [global_batch(undisturbed, step, 8) for step in range(30)]
    resumed = stream(world_size, micro, accum, sizes=BlockSizes(notes if noted else None, blocks.identity))
    for step in range(17, 30):
        assert all(map(torch.equal, global_batch(resumed, step, accum), wanted[step]))


def test_a_run_that_goes_on_opens_the_blocks_of_its_step_alone(stream, tmp_path, blocks, monkeypatch):
    sizes = BlockSizes(tmp_path, blocks.identity)
    global_batch(stream(sizes=sizes), 60, 8)
    (resumed,) = stream(sizes=BlockSizes(tmp_path, blocks.identity))
    read, of_part = [], resumed._read  # its own alone: the other run may still be reading ahead
    monkeypatch.setattr(resumed, "_read", lambda part: (read.append(part.index), of_part(part))[1])
    for micro_step in range(8):
        resumed(60, micro_step)
    assert resumed.num_lanes <= len(read) <= 2 * resumed.num_lanes  # a block of each lane, and the one after it


def test_every_row_is_seen_once_before_any_is_seen_again(stream, blocks):
    (batches,) = stream(micro=1, accum=1)
    assert batches.num_lanes == 1
    sizes = [blocks.ids(part) for part in blocks.train]
    num_rows = sum((ids.size - 1) // T for ids in sizes)
    wanted = sorted(tuple(ids[row * T : (row + 1) * T].tolist()) for ids in sizes for row in range((ids.size - 1) // T))
    epochs = [
        [tuple(batches(step, 0)[0][0].tolist()) for step in range(e * num_rows, (e + 1) * num_rows)] for e in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == wanted
    assert epochs[0] != epochs[1]
    assert epochs[0] != wanted


def test_targets_are_the_tokens_that_follow(stream):
    tokens, targets = stream()[0](5, 3)
    assert tokens.shape == targets.shape == (2, T)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.dtype == torch.int64


def test_a_rank_reads_its_own_lanes_alone(stream, blocks, monkeypatch):
    read = {0: set(), 1: set()}
    for batches in stream(2, 2, 4):
        rank = batches._first_slot // 8
        note = batches._sizes.note
        monkeypatch.setattr(batches, "_sizes", BlockSizes(None, ""))
        monkeypatch.setattr(
            batches._sizes,
            "note",
            lambda part, size, rank=rank, note=note: (read[rank].add(part.index), note(part, size)),
        )
        for micro_step in range(4):
            batches(0, micro_step)
    assert read[0]
    assert read[1]
    assert not read[0] & read[1]


def test_another_seed_is_another_order(stream):
    assert not torch.equal(stream(seed=1)[0](0, 0)[0], stream(seed=2)[0](0, 0)[0])


def test_validation_is_never_trained_on(blocks):
    val, train = {part.index for part in blocks.val}, {part.index for part in blocks.train}
    assert not val & train
    assert val | train == {part.index for part in blocks.parts}
    assert len(val) == round(0.1 * len(blocks.parts))
    some = blocks.validation(100)
    assert some.num_tokens == blocks.ids(blocks.val[0]).size
    assert blocks.validation(10**9).num_tokens == sum(blocks.ids(part).size for part in blocks.val)


def test_notes_of_other_blocks_and_torn_lines_are_passed_over(tmp_path, blocks):
    part, other = blocks.parts[:2]
    BlockSizes(tmp_path, "another").note(part, 5)
    ours = BlockSizes(tmp_path, blocks.identity, rank=1)
    ours.note(part, 7)
    with (tmp_path / "sizes-00001.jsonl").open("a") as file:
        file.write('{"blocks": "torn')
    BlockSizes(tmp_path, blocks.identity, rank=1).note(other, 9)
    again = BlockSizes(tmp_path, blocks.identity)
    assert (again.get(part), again.get(other), again.get(blocks.parts[2])) == (7, 9, None)


def test_lanes_are_a_divisor_of_the_rows_of_a_step():
    assert [num_lanes(rows) for rows in (1, 7, 16, 17, 24, 512)] == [1, 7, 16, 1, 12, 16]


def test_what_cannot_be_streamed_is_refused(tmp_path, monkeypatch):
    small = made.tables_of(made.write_table(tmp_path / "a.jsonl", ["one"]))
    with pytest.raises(UserError, match=r"data\.streaming: 1 part of about 8 MiB .* cannot both train and validate"):
        blocks_of(small, ByteTokenizer(), "bytes", 0.1)
    packed = made.tables_of(made.write_table(tmp_path / "a.jsonl.gz", ["one"]))
    with pytest.raises(UserError, match=r"data\.streaming: .*a\.jsonl\.gz can only be read from its beginning"):
        blocks_of(packed, ByteTokenizer(), "bytes", 0.1)


def test_blocks_without_a_row_end_in_a_line_and_not_in_a_search(stream, blocks):
    ranks = stream()
    ranks[0]._seq_len = 10**6
    with pytest.raises(UserError, match=r"data\.streaming: no part of the corpus has the 1000001 tokens of a row"):
        ranks[0](0, 0)


def test_no_thread_stays_behind(stream):
    (batches,) = stream()
    batches(0, 0)
    batches.close()
    batches._pool.shutdown(wait=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stream")]
