import numpy as np
import pytest
import torch

from zeroshard.data.base import TextRows, num_rows, require_enough
from zeroshard.data.batches import EvalBatches, RowBatches
from zeroshard.data.stream import StreamBatches
from zeroshard.data.tokens import TokenDataset
from zeroshard.host.errors import UserError

SEQ_LEN = 4


def corpus(num_tokens):
    """Token i is i: a batch shows where it came from."""
    return TokenDataset([np.arange(num_tokens, dtype=np.uint32)], vocab_size=num_tokens)


def rows_of(tokens):
    return (tokens[:, 0] // SEQ_LEN).tolist()


def global_batch(world_size, micro_batch_size, grad_accum_steps, step):
    """Rows of a step in stream order."""
    ranks = [
        RowBatches(TextRows(corpus(403), SEQ_LEN), micro_batch_size, grad_accum_steps, rank, world_size, seed=5)
        for rank in range(world_size)
    ]
    return [row for micro in range(grad_accum_steps) for rank in ranks for row in rows_of(rank(step, micro)[0])]


def test_targets_are_the_tokens_one_place_on():
    tokens, targets = RowBatches(TextRows(corpus(41), SEQ_LEN), micro_batch_size=3)(0, 0)
    assert tokens.shape == targets.shape == (3, SEQ_LEN)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(SEQ_LEN))


@pytest.mark.parametrize("step", [0, 3, 20])
def test_any_world_reads_the_same_global_batch_in_the_same_order(step):
    expected = global_batch(1, 12, 1, step)
    for world_size, micro_batch_size, grad_accum_steps in [(1, 3, 4), (2, 6, 1), (3, 2, 2), (4, 1, 3)]:
        assert global_batch(world_size, micro_batch_size, grad_accum_steps, step) == expected


def test_steps_continue_one_stream_that_visits_each_row_once_an_epoch():
    batches = RowBatches(TextRows(corpus(4 * 30 + 1), SEQ_LEN), micro_batch_size=6)
    stream = [row for step in range(10) for row in rows_of(batches(step, 0)[0])]
    assert sorted(stream[:30]) == sorted(stream[30:]) == list(range(30))
    assert stream[:30] != stream[30:]


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_of_several_is_given_by_name_and_a_process_alone_need_not_be(joined, monkeypatch):
    rows, refused = TextRows(corpus(41), SEQ_LEN), pytest.raises(ValueError, match="in one of 2 processes, which would")
    if joined:
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    else:
        launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
    makers = (
        lambda **ranks: RowBatches(rows, 1, **ranks),
        lambda **ranks: EvalBatches(rows, 1, 4, **ranks),
        lambda **ranks: StreamBatches(None, seq_len=1, micro_batch_size=1, **ranks),
    )
    for make in makers:
        for ranks in ({}, {"rank": 0}, {"world_size": 2}):
            with refused:
                make(**ranks)
    for make in makers[:2]:
        assert make(rank=0, world_size=1).world_size == 1


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1"):
        RowBatches(TextRows(corpus(41), SEQ_LEN), 0)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        RowBatches(TextRows(corpus(41), SEQ_LEN), 1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="4 tokens hold no row of seq_len"):
        RowBatches(TextRows(corpus(4), SEQ_LEN), 1)
    with pytest.raises(ValueError, match=r"micro_step must be in \[0, 2\), got 2"):
        RowBatches(TextRows(corpus(41), SEQ_LEN), 1, 2)(0, 2)
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        EvalBatches(TextRows(corpus(41), SEQ_LEN), 1, max_rows=0)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 7, 1000])
@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_any_world_evaluates_the_same_rows_once(world_size, micro_batch_size):
    rows = TextRows(corpus(403), SEQ_LEN)
    ranks = [list(EvalBatches(rows, micro_batch_size, 10, rank, world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1  # a rank with fewer forwards would hang the others
    counted = [row for batches in ranks for tokens, _, weight in batches if weight for row in rows_of(tokens)]
    assert sorted(counted) == list(range(0, 100, 10))  # 10 of 100 rows, spread evenly
    assert sum(weight for batches in ranks for _, _, weight in batches) == 10


def test_evaluation_takes_what_a_short_corpus_has():
    batches = EvalBatches(TextRows(corpus(4 * 7 + 1), SEQ_LEN), 2, 100)
    assert [(rows_of(tokens), weight) for tokens, _, weight in batches] == [
        ([0, 1], 2),
        ([2, 3], 2),
        ([4, 5], 2),
        ([6], 1),
    ]
    ((tokens, _, weight),) = EvalBatches(TextRows(corpus(4 * 3 + 1), SEQ_LEN), 8, 100)
    assert rows_of(tokens) == [0, 1, 2]
    assert weight == 3


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_row_needs_one_token_more_for_its_last_target(num_tokens, expected):
    assert num_rows(corpus(num_tokens), SEQ_LEN) == expected


def test_a_corpus_too_short_for_a_batch_is_named_with_counts():
    require_enough(corpus(33), SEQ_LEN, rows=8)
    with pytest.raises(UserError) as caught:
        require_enough(corpus(32), SEQ_LEN, rows=8)
    assert str(caught.value) == (
        "data: the train split has 32 tokens, which make 7 rows of seq_len 4, but one batch needs 8 rows (33 tokens); "
        "use more text, or lower seq_len, micro_batch_size, grad_accum_steps or the number of ranks"
    )
    with pytest.raises(UserError, match=r"the val split has 4 tokens.*larger data.val_fraction"):
        require_enough(corpus(4), SEQ_LEN, rows=1, split="val")
