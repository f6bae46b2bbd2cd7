"""Ranks that want to stop for different reasons agree on one, by two sums."""

import pytest

from zeroshard.host.errors import ExitStatus
from zeroshard.train.loop.stopping import STOPPED, agreed_stop, as_numbers

MOST_RANKS = 1 << 19


@pytest.mark.parametrize("wish", [ExitStatus.OK, *STOPPED])
@pytest.mark.parametrize("ranks", [1, 3, MOST_RANKS])
def test_a_wish_of_all_ranks_is_what_they_do(wish, ranks):
    preempted, others = as_numbers(wish)
    assert agreed_stop(preempted * ranks, others * ranks) == wish


@pytest.mark.parametrize(
    ("wishes", "status"),
    [
        ([ExitStatus.PREEMPTED, ExitStatus.INTERRUPTED, ExitStatus.TERMINATED], ExitStatus.TERMINATED),
        ([ExitStatus.PREEMPTED, ExitStatus.INTERRUPTED, ExitStatus.OK], ExitStatus.INTERRUPTED),
        ([ExitStatus.PREEMPTED, ExitStatus.OK, ExitStatus.OK], ExitStatus.PREEMPTED),
    ],
)
def test_of_several_wishes_one_counts(wishes, status):
    numbers = [as_numbers(wish) for wish in wishes]
    assert agreed_stop(*(sum(each) for each in zip(*numbers, strict=True))) == status
