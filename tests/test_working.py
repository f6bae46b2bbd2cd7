"""A spinner on a terminal's stderr, and nothing in a pipe."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from terminal import Screen
from zeroshard.verbs.working import cursor_given_back, working


def test_a_terminal_sees_a_spinner_while_a_command_works_and_nothing_of_it_afterwards(monkeypatch):
    screen, out = Screen(60), io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", out)
    with working("planning"):
        assert "planning" in screen.shown[0]
        assert not screen.cursor_shown
        print("the answer")
    assert (screen.shown, out.getvalue()) == ([], "the answer\n")
    assert screen.cursor_shown


def test_the_cursor_comes_back_after_an_interrupt(monkeypatch):
    screen = Screen(60)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(KeyboardInterrupt), working("planning"):
        raise KeyboardInterrupt
    assert screen.cursor_shown


def test_a_pipe_gets_nothing_but_the_answer(capsys):
    with working("planning"):
        print("the answer")
    assert capsys.readouterr() == ("the answer\n", "")


def test_without_a_thread_the_first_picture_stays(monkeypatch):
    screen, threads = Screen(60), set(threading.enumerate())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with working("evaluating", moves=False):
        assert "evaluating" in screen.shown[0]
        assert set(threading.enumerate()) <= threads
    assert screen.shown == []


def test_a_spinner_that_was_ended_at_once_leaves_the_cursor(monkeypatch):
    screen = Screen(60)
    monkeypatch.setattr(sys, "stderr", screen)
    with cursor_given_back():
        screen.write("\x1b[?25l* evaluating")
    assert (screen.shown, screen.cursor_shown) == ([], True)
