import random

from zeroshard.lab.bench.report import Column, Report, Spread, interleaved, milliseconds, spread_of


def test_a_spread_is_the_median_and_its_quartiles():
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert Spread(2.0, 1.0, 4.0, 3).inverse(8.0) == Spread(4.0, 2.0, 8.0, 3)


def test_numbers_are_written_with_their_quartiles_where_there_are_any():
    assert milliseconds(spread_of([0.001, 0.002, 0.003])) == "2.000 (1.500-2.500)"


def test_each_round_visits_all_contestants_in_an_order_of_its_own():
    visited = []
    calls = {name: (lambda name=name: visited.append(name) or float(len(visited))) for name in "abc"}
    seen = interleaved(calls, 4, random.Random(0))
    rounds = [visited[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(each) == list("abc") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert [seen[visited[0]][0], seen[visited[1]][0]] == [1.0, 2.0]
    again = []
    interleaved({name: (lambda name=name: again.append(name) or 0.0) for name in "abc"}, 4, random.Random(0))
    assert again == visited  # ranks that shuffle alike


def _report(**more):
    rows = [
        {"name": "zero0", "size": "1MiB", "time_s": spread_of([0.001, 0.002, 0.003])},
        {"name": "ddp", "size": "1MiB", "time_s": None},
    ]
    columns = [Column("name", "who"), Column("time_s", "ms", milliseconds)]
    return Report("step", rows, columns, **more)


def test_the_table_has_words_to_the_left_and_numbers_to_the_right():
    assert _report(notes=["that is all"]).text().splitlines() == [
        "who                     ms",
        "zero0  2.000 (1.500-2.500)",
        "ddp",
        "that is all",
    ]
