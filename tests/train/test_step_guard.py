import json

from zeroshard.train.loop.step_guard import FEWEST, StepGuard

NAN, INF = float("nan"), float("inf")


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    guard = StepGuard(max_in_a_row=3)
    assert [guard.judge(*numbers) for numbers in [(1.0, 1.0), (NAN, 1.0), (1.0, INF), (1.0, NAN)]] == [
        "taken",
        "not finite",
        "not finite",
        "not finite",
    ]
    assert guard.num_skipped == 3
    assert guard.given_up


def test_one_good_step_in_between_starts_the_count_anew():
    guard = StepGuard(max_in_a_row=2)
    for loss in (NAN, 1.0, NAN, 1.0):
        guard.judge(loss, 1.0)
        assert not guard.given_up
    assert guard.num_skipped == 2


def test_an_overflow_is_the_loss_scales_business():
    guard = StepGuard(max_in_a_row=1)
    assert guard.judge(INF, INF, overflow=True) == "overflow"
    assert not guard.given_up
    assert guard.num_skipped == 1


def _warm(guard):
    for step in range(FEWEST):
        assert guard.judge(3.0 + 0.1 * (step % 2), 1.0) == "taken"
    return guard


def test_a_loss_far_above_the_last_ones_is_a_spike():
    assert _warm(StepGuard(spike_sigma=6.0)).judge(4.0, 1.0) == "spike"
    assert _warm(StepGuard(spike_sigma=6.0)).judge(3.2, 1.0) == "taken"
    assert _warm(StepGuard()).judge(1e9, 1.0) == "taken"
    assert StepGuard(spike_sigma=6.0).judge(1e9, 1.0) == "taken"  # nothing to compare with yet


def test_a_spike_does_not_move_what_later_losses_are_measured_against():
    guard = _warm(StepGuard(spike_sigma=6.0))
    before = guard.state_dict()["losses"]
    guard.judge(4.0, 1.0)
    assert guard.state_dict()["losses"] == before
    assert guard.num_skipped == 1


def test_a_loss_that_stays_up_is_a_new_level():
    guard = _warm(StepGuard(max_in_a_row=3, spike_sigma=6.0))
    assert [guard.judge(9.0, 1.0) for _ in range(5)] == ["spike", "spike", "spike", "taken", "taken"]
    assert not guard.given_up


def test_at_a_new_level_losses_are_measured_against_that_level_alone():
    guard = _warm(StepGuard(max_in_a_row=3, spike_sigma=2.0))
    verdicts = [guard.judge(9.0, 1.0) for _ in range(3 + FEWEST)]
    assert verdicts == ["spike"] * 3 + ["taken"] * FEWEST
    assert guard.judge(9.1, 1.0) == "spike"  # the level has no deviation
    assert guard.state_dict()["losses"] == [9.0] * FEWEST


def test_a_resumed_guard_judges_as_the_first_would_have():
    first, other = _warm(StepGuard(3, 6.0)), StepGuard(3, 6.0)
    for loss in (5.0, NAN):
        first.judge(loss, 1.0)
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in (NAN, 5.0, 3.0, NAN, NAN, NAN):
        assert first.judge(loss, 1.0) == other.judge(loss, 1.0)
        assert first.given_up == other.given_up
    assert first.state_dict() == other.state_dict()
