from zeroshard.profiling.overlap import TimedOperation, overlap, under_way


def test_shares_add_up_to_the_time_in_which_anything_was_under_way():
    operations = [
        TimedOperation("a", 0.0, 4.0),
        TimedOperation("b", 1.0, 6.0),
        TimedOperation("a", 7.0, 8.0),
        TimedOperation("c", 7.5, 7.8),
    ]
    found = under_way(operations)
    assert found == {"a": 5.0, "b": 2.0, "c": 0.0}
    assert sum(found.values()) == 7.0  # 0 to 6, and 7 to 8


def test_what_was_not_exposed_was_hidden_and_never_less_than_nothing():
    found = overlap({"a": 5.0, "b": 1.0}, {"b": 1.5, "c": 2.0})
    assert list(found) == ["c", "b", "a"]
    assert [value.hidden_s for value in found.values()] == [0.0, 0.0, 5.0]
