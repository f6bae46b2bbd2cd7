"""With ``--soak`` the tests of this folder run a second time, over a communicator that delivers late (`late`)."""

import pytest

from late import late
from zeroshard.comm import run_threads

DELIVERIES = ["on_time", pytest.param("late", marks=pytest.mark.soak)]


def pytest_generate_tests(metafunc):
    """Twice what runs on thread ranks."""
    if hasattr(metafunc.module, "run_threads") and "gloo_ranks" not in metafunc.fixturenames:
        metafunc.parametrize("delivery", DELIVERIES, indirect=True)


@pytest.fixture(autouse=True)
def delivery(request, monkeypatch):
    """Whether results are there when `run_threads` of the test's module says so, or at `wait`."""
    if getattr(request, "param", "on_time") == "late":
        monkeypatch.setattr(request.module, "run_threads", _run_late)


def _run_late(fn, world_size, **kwargs):
    return run_threads(lambda comm: fn(late(comm)), world_size, **kwargs)
