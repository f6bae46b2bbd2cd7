import threading

import pytest

from zeroshard.comm import current_scope, scope


def test_the_innermost_label_counts_and_ends_with_its_block():
    assert current_scope() == ""
    with scope("outer"):
        with scope("inner"):
            assert current_scope() == "inner"
        assert current_scope() == "outer"
        with pytest.raises(KeyError), scope("failed"):
            raise KeyError
        assert current_scope() == "outer"
    assert current_scope() == ""


def test_a_label_is_its_own_threads():
    seen = []
    with scope("here"):
        thread = threading.Thread(target=lambda: seen.append(current_scope()))
        thread.start()
        thread.join()
    assert seen == [""]
