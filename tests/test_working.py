"""A word on a terminal's stderr, and nothing in a pipe."""

from __future__ import annotations

import sys

from terminal import Screen
from zeroshard.verbs.working import working


def test_a_terminal_sees_that_a_command_works_and_nothing_of_it_afterwards(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    with working("planning"):
        assert screen.shown == ["planning ..."]
        print("the answer is")
    assert screen.shown == ["the answer is"]


def test_a_pipe_gets_nothing_but_the_answer(capsys):
    with working("planning"):
        print("the answer")
    assert capsys.readouterr() == ("the answer\n", "")
