import json

from zeroshard.train.loop.step_guard import StepGuard

NAN, INF = float("nan"), float("inf")


def test_a_step_that_is_not_finite_is_skipped_and_counted_and_a_good_one_starts_the_count_anew():
    guard = StepGuard(max_in_a_row=2)
    for numbers in [(NAN, 1.0), (1.0, 1.0), (1.0, INF), (1.0, 1.0)]:
        assert guard.judge(*numbers) == ("taken" if numbers == (1.0, 1.0) else "not finite")
        assert not guard.given_up
    assert [guard.judge(1.0, NAN), guard.given_up, guard.judge(NAN, 1.0), guard.given_up] == [
        *("not finite", False),
        *("not finite", True),
    ]
    assert guard.num_skipped == 4


def test_an_overflow_is_the_loss_scales_business():
    guard = StepGuard(max_in_a_row=1)
    assert guard.judge(INF, INF, overflow=True) == "overflow"
    assert not guard.given_up
    assert guard.num_skipped == 1


def test_a_resumed_guard_judges_as_the_first_would_have():
    first, other = StepGuard(3), StepGuard(3)
    for loss in (5.0, NAN):
        first.judge(loss, 1.0)
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in (NAN, 5.0, 3.0, NAN, NAN, NAN):
        assert first.judge(loss, 1.0) == other.judge(loss, 1.0)
        assert first.given_up == other.given_up
    assert first.state_dict() == other.state_dict()
