"""A command's process hardly searches for garbage; a process that calls the command line keeps its own ways."""

import gc

from zeroshard import cli


def test_whoever_calls_the_command_line_is_left_alone(capsys):
    before = gc.get_threshold(), gc.get_freeze_count()
    assert cli.main(["--version"]) == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
