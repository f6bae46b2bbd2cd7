"""How tensors are cut."""

import pytest
import torch

from zeroshard.comm import PeerError, RingCommunicator, labelled, run_threads, thread_transports
from zeroshard.comm.operation_log import OperationLog
from zeroshard.comm.queued import pieces
from zeroshard.comm.queued.pieces import on_flat, shard_interval, topic_of


@pytest.mark.parametrize("numel", [0, 1, 3, 4, 5, 7, 12, 1001])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_shards_cover_the_tensor_once_and_none_is_larger_than_the_first(numel, world_size):
    intervals = [shard_interval(numel, world_size, rank) for rank in range(world_size)]
    assert [i for start, stop in intervals for i in range(start, stop)] == list(range(numel))
    assert all(stop - start <= intervals[0][1] for start, stop in intervals)


def test_a_tensor_in_order_is_worked_on_where_it_lies():
    tensor, seen = torch.zeros(3, 4), []
    on_flat(tensor, seen.append)()
    assert [flat.data_ptr() for flat in seen] == [tensor.data_ptr()]


@pytest.mark.parametrize(
    "strided",
    [
        lambda: torch.arange(60.0).view(6, 10).t(),
        lambda: torch.arange(60.0)[::3],
        lambda: torch.arange(120.0).view(2, 3, 20)[:, 1:, ::2],
        lambda: torch.arange(60.0).view(1, 1, 60).expand(1, 1, 60).transpose(0, 2)[::7],
    ],
)
def test_a_strided_tensor_is_worked_on_in_small_copies_in_its_own_order(strided, monkeypatch):
    monkeypatch.setattr(pieces, "PACKED_BYTES", 32)
    tensor = strided()
    before, seen = tensor.clone(), []

    def double(flat):
        assert flat.is_contiguous()
        assert flat.nbytes <= 32
        seen.extend(flat.tolist())
        flat.mul_(2)

    on_flat(tensor, double)()
    assert seen == before.flatten().tolist()
    assert torch.equal(tensor, before * 2)


_NUMBERS = torch.complex(torch.arange(24.0), torch.arange(24.0) + 1)


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(12.0),
        torch.arange(12).bool(),
        torch.arange(24.0)[::2],
        _NUMBERS[:12].conj(),
        _NUMBERS.conj().imag[:12],
        torch.arange(24.0)[::2].to(torch.bfloat16),
        torch.empty(0),
    ],
    ids=["in order", "bool", "strided", "conjugated", "negated", "bfloat16", "empty"],
)
@pytest.mark.parametrize("stride", [1, 3])
def test_a_copy_has_the_elements_of_its_source_however_they_lie(source, stride):
    room = torch.zeros(stride * len(source), dtype=source.dtype)
    pieces.copy(room[::stride], source)
    assert torch.equal(room[::stride], source)
    assert not room.view(-1, stride)[:, 1:].any()


def test_a_copy_never_goes_past_its_target():
    room, target = torch.zeros(6), torch.zeros(2)
    with pytest.raises(RuntimeError):
        pieces.copy(target, torch.ones(3))
    pieces.copy(target, torch.ones(2, dtype=torch.float64))
    pieces.copy(room[:2], torch.ones(()))
    assert torch.equal(target, torch.ones(2))
    assert torch.equal(room, torch.tensor([1.0, 1, 0, 0, 0, 0]))


def test_ranks_that_issue_the_same_agree_on_topics_which_no_other_operation_has():
    four, eight = torch.zeros(4), torch.zeros(8)
    issued = [("sum", four), ("sum", four), ("max", four), ("sum", eight), ("barrier", None)]
    one, other = OperationLog(0), OperationLog(0)
    topics = [topic_of(one, *operation) for operation in issued]
    assert topics == [topic_of(other, *operation) for operation in issued]
    assert (
        len({*topics, *(topic_of(OperationLog(0), *operation) for operation in issued)}) == len(issued) + 3
    )  # firsts of 4 kinds


def test_operations_of_one_size_under_two_labels_have_two_topics():
    """So that ranks which have diverged do not take one block's weights for another's."""

    def topic(label):
        with labelled(label):
            return topic_of(OperationLog(0), "all_gather", torch.empty(8))

    assert topic("blocks.0/weights") == topic("blocks.0/weights") != topic("blocks.1/weights")


@pytest.mark.parametrize("theirs", [torch.int32, torch.float64])
def test_ranks_whose_tensors_have_as_many_bytes_and_another_dtype_are_told(theirs):
    transports = thread_transports(2, timeout_s=600)

    def on_rank(comm):
        ring = RingCommunicator(transport=transports[comm.rank])
        mine = torch.ones(4) if comm.rank == 0 else torch.ones(16 // theirs.itemsize, dtype=theirs)
        with pytest.raises(PeerError, match=r"called a different collective than this rank|did not take a message"):
            ring.all_reduce(mine).wait()
        ring.close()

    run_threads(on_rank, 2)
