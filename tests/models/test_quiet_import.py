"""Imports without warnings, by several threads at once."""

import logging
from threading import Barrier, Thread

import pytest

from zeroshard.models import quiet_import as module
from zeroshard.models.quiet_import import quiet_import


@pytest.fixture
def imported_by_two(monkeypatch):
    """Two threads inside of an import at the same time; the first to enter is the first to leave."""
    entered, left = Barrier(2), Barrier(2)
    levels = []

    def import_module(name):
        if name == "second":
            entered.wait(600)  # the first one is inside
        levels.append(logging.root.manager.disable)
        if name == "first":
            entered.wait(600)
            second_is_inside.wait(600)
        else:
            second_is_inside.wait(600)
            left.wait(600)  # the first one has left
        return name

    second_is_inside = Barrier(2)

    def first():
        quiet_import("first")
        left.wait(600)

    monkeypatch.setattr(module, "import_module", import_module)
    threads = [Thread(target=first), Thread(target=quiet_import, args=("second",))]
    before = logging.root.manager.disable
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield levels, before
    logging.disable(before)


def test_threads_that_import_at_once_leave_logging_as_it_was(imported_by_two):
    levels, before = imported_by_two
    assert levels == [logging.WARNING, logging.WARNING]
    assert logging.root.manager.disable == before
