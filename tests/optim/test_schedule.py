import pytest

from zeroshard.optim import learning_rate

RUN = {"lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 10, "max_steps": 110}


def test_warm_up_climbs_in_equal_steps_from_one_share_to_the_peak():
    assert learning_rate(0, **RUN) == 6e-4 / 10
    assert learning_rate(4, **RUN) == 6e-4 * 5 / 10
    assert learning_rate(9, **RUN) == 6e-4


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_leaves_from_the_peak_and_ends_at_the_minimum_exactly(decay):
    assert learning_rate(10, **RUN, decay=decay) == 6e-4
    assert learning_rate(110, **RUN, decay=decay) == 6e-5
    assert learning_rate(10**9, **RUN, decay=decay) == 6e-5


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_the_rate_never_rises_after_warm_up(decay):
    rates = [learning_rate(step, **RUN, decay=decay) for step in range(9, 120)]
    assert rates == sorted(rates, reverse=True)


def test_constant_stays_at_the_peak():
    assert {learning_rate(step, **RUN, decay="constant") for step in (9, 10, 60, 500)} == {6e-4}


def test_wsd_stays_at_the_peak_and_comes_down_by_a_line_in_its_share_of_the_steps():
    rates = {step: learning_rate(step, **RUN, decay="wsd", decay_share=0.2) for step in (9, 10, 88, 99, 110, 500)}
    assert (rates[9], rates[10], rates[88]) == (6e-4, 6e-4, 6e-4)  # 22 of 110 steps are left
    assert rates[99] == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-12)
    assert (rates[110], rates[500]) == (6e-5, 6e-5)


def test_wsd_leaves_warm_up_alone_and_takes_a_step_at_least():
    assert learning_rate(9, **RUN, decay="wsd", decay_share=1.0) == 6e-4
    assert learning_rate(109, **RUN, decay="wsd", decay_share=1e-9) == 6e-4


def test_a_run_no_longer_than_its_warm_up_ends_within_it():
    assert learning_rate(4, lr=0.1, min_lr=0.0, warmup_steps=10, max_steps=5) == 0.1 * 5 / 10
    assert learning_rate(5, lr=0.1, min_lr=0.0, warmup_steps=5, max_steps=5) == 0.0
    assert learning_rate(3, lr=0.1, min_lr=0.1, warmup_steps=0, max_steps=5) == 0.1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"min_lr": float("inf")}, "min_lr"),
        ({"min_lr": 7e-4}, "min_lr"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"max_steps": -1}, "max_steps"),
        ({"step": -1}, "step"),
        ({"decay": "cosin"}, "decay"),
    ],
)
def test_what_is_no_schedule_is_refused_by_name(changes, field):
    with pytest.raises(ValueError, match=f"^{field}: "):
        learning_rate(**{"step": 50, **RUN, **changes})
