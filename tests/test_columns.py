from zeroshard.columns import columns


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("name", "bytes", "note"), ("a.long.name", "7", ""), ("b", "1,024", "x")]
    assert columns(rows, right=(1,)) == ["name         bytes  note", "a.long.name      7", "b            1,024  x"]
    assert columns([]) == []
