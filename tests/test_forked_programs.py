import pytest

import forked


def test_a_fork_server_that_has_ended_is_an_error_and_not_a_wait_for_ever(monkeypatch, tmp_path):
    monkeypatch.setenv(forked.ADDRESS, str(tmp_path / "nobody"))
    monkeypatch.setattr(forked, "TIME_TO_START_S", 0.0)
    with pytest.raises(RuntimeError, match=r"fork_server\.py has ended"):
        forked.connect()
