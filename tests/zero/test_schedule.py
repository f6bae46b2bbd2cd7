import pytest

from zeroshard.zero.schedule import ROOT, Cursor, Op, backward_ops, forward_ops


def _short(ops):
    return " ".join(f"{op.action[0]}{'root' if op.place == ROOT else op.place}" for op in ops)


def test_forward_gathers_first_to_last():
    assert _short(forward_ops(3)) == "g0 g1 g2"


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (0, "g3 r3 g2 r2 g1 r1 g0 r0 rroot"),
        (1, "g3 g2 r3 g1 r2 g0 r1 r0 rroot"),
        (2, "g3 g2 g1 r3 g0 r2 r1 r0 rroot"),
        (9, "g3 g2 g1 g0 r3 r2 r1 r0 rroot"),
    ],
)
def test_backward_gathers_ahead_and_reduces_what_is_over(prefetch, expected):
    assert _short(backward_ops(4, prefetch=prefetch, gather=True)) == expected


def test_whole_weights_are_not_gathered():
    assert _short(backward_ops(3, prefetch=1, gather=False)) == "r2 r1 r0 rroot"


def test_a_model_without_units_reduces_its_root():
    assert _short(backward_ops(0, prefetch=1, gather=True)) == "rroot"


@pytest.mark.parametrize("num_units", range(5))
@pytest.mark.parametrize("prefetch", range(5))
def test_every_unit_is_gathered_once_and_then_reduced_once(num_units, prefetch):
    ops = backward_ops(num_units, prefetch=prefetch, gather=True)
    assert sorted(ops) == sorted(
        [Op("gather", p) for p in range(num_units)] + [Op("reduce", p) for p in range(-1, num_units)]
    )
    for place in range(num_units):
        assert ops.index(Op("gather", place)) < ops.index(Op("reduce", place))
        live = [op.action == "gather" or -1 for op in ops[: ops.index(Op("gather", place)) + 1]]
        assert sum(live) <= prefetch + 1


def test_a_cursor_runs_everything_on_its_way_and_never_twice():
    ran = []
    ops = [Op("gather", 0), Op("gather", 1), Op("reduce", 1), Op("reduce", 0)]
    cursor = Cursor(ops, ran.append)
    cursor.before(Op("reduce", 1))
    assert ran == ops[:2]
    cursor.through(Op("gather", 0))
    cursor.through(Op("reduce", 7))
    assert ran == ops[:2]
    cursor.through(Op("reduce", 1))
    assert ran == ops[:3]
    cursor.finish()
    cursor.finish()
    assert ran == ops


def test_an_operation_may_move_the_cursor_itself():
    ran = []

    def run(op):
        ran.append(op)
        cursor.finish()

    ops = forward_ops(3)
    cursor = Cursor(ops, run)
    cursor.through(ops[0])
    assert ran == ops
