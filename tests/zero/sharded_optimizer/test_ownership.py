"""Owners and buckets, from sizes alone."""

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.zero.sharded_optimizer.ownership import Bucket, assign, pack


def test_the_largest_goes_first_and_to_the_rank_that_has_least():
    loads = [0, 0, 0]
    assert assign([1, 8, 5, 5, 8, 3], [True] * 6, loads) == [1, 0, 2, 2, 1, 0]
    assert loads == [11, 9, 10]


def test_equal_tensors_go_round_in_their_order():
    assert assign([4] * 5, [True] * 5, [0, 0]) == [0, 1, 0, 1, 0]


def test_later_ones_fill_up():
    loads = [9, 1]
    assert assign([4, 4, 4], [True] * 3, loads) == [1, 1, 0]
    assert loads == [13, 9]


def test_frozen_tensors_do_not_disturb_the_balance_of_the_others():
    assert assign([100, 3, 50, 3], [False, True, False, True], [0, 0]) == [0, 0, 1, 1]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_no_rank_has_more_than_its_share_and_one_tensor(sizes, world_size):
    loads = [0] * world_size
    owners = assign(sizes, [True] * len(sizes), loads)
    assert loads == [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(world_size)]
    assert max(loads) * world_size <= sum(sizes) + (world_size - 1) * max(sizes)


def test_buckets_of_the_owners_alternate():
    sizes = [4, 4, 4, 4, 4]
    assert pack(range(5), [0, 0, 0, 1, 1], sizes, [0] * 5, 8, 2) == [
        Bucket(0, (0, 1)),
        Bucket(1, (3, 4)),
        Bucket(0, (2,)),
    ]


def test_a_large_tensor_travels_alone_and_small_ones_close_ranks_around_it():
    assert pack(range(3), [0] * 3, [3, 8, 3], [0] * 3, 8, 1) == [Bucket(0, (0, 2)), Bucket(0, (1,))]


def test_only_what_moved_travels_and_devices_do_not_mix():
    found = pack([0, 2, 3], [0] * 4, [1] * 4, ["a", "a", "b", "a"], 8, 3)
    assert found == [Bucket(0, (0, 3)), Bucket(0, (2,))]
    assert pack([], [0], [1], ["a"], 8, 2) == []


@given(st.data())
def test_every_tensor_travels_once_in_a_bucket_that_fits(data):
    n, world_size = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 3))
    draw = lambda values: data.draw(st.lists(values, min_size=n, max_size=n))  # noqa: E731
    sizes, owners, devices = draw(st.integers(0, 30)), draw(st.integers(0, world_size - 1)), draw(st.integers(0, 1))
    buckets = pack(range(n), owners, sizes, devices, 16, world_size)
    assert sorted(i for bucket in buckets for i in bucket.members) == list(range(n))
    for bucket in buckets:
        assert {owners[i] for i in bucket.members} == {bucket.owner}
        assert len({devices[i] for i in bucket.members}) == 1
        assert len(bucket.members) == 1 or sum(sizes[i] for i in bucket.members) <= 16
