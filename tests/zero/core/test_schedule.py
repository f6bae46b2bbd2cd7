import pytest

from zeroshard.zero.core.schedule import ROOT, Cursor, Op, backward_ops


def _short(ops):
    return " ".join(f"{op.action[0]}{'root' if op.place == ROOT else op.place}" for op in ops)


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
    cursor.through(ops[-1])
    cursor.through(ops[-1])
    assert ran == ops


def test_an_operation_may_move_the_cursor_itself():
    ran = []

    def run(op):
        ran.append(op)
        cursor.through(ops[-1])

    ops = [Op("gather", place) for place in range(3)]
    cursor = Cursor(ops, run)
    cursor.through(ops[0])
    assert ran == ops
