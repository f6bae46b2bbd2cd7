import os
import pty
import sys

from run_folders import LINK, write_run
from zeroshard.lab.run_folders import read_run
from zeroshard.lab.sweep.board import SweepProgress
from zeroshard.lab.sweep.cases import make_case


def shown(play) -> str:
    """What a terminal is sent while ``play(board)`` runs."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        play(SweepProgress(terminal))
        terminal.flush()
        os.set_blocking(master, False)
        text = b""
        while True:
            try:
                text += os.read(master, 1 << 16)
            except BlockingIOError:
                break
    os.close(master)
    return text.decode()


def test_a_terminal_shows_a_table_that_moves(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    good, bad = make_case({}, {"seed": 1}), make_case({}, {"seed": 2})
    run = read_run(write_run(tmp_path / "run", link=LINK))

    def play(board):
        with board.live([good, bad], 4):
            board.begins(good, 0)
            board.ended(good, 0, run, seconds=12.0)
            board.ended(bad, 0, read_run(tmp_path / "none"), seconds=6.0, failure="status 1: no")

    text = shown(play)
    assert "0 of 4 runs" in text
    assert "run 1, since" in text
    assert "2 of 4 runs  18 s left" in text
    assert "100.0 ms" in text
    assert "640" in text
    assert "30%" in text
    assert "status 1: no" in text


def test_a_pipe_gets_a_line_for_each_run_and_what_cannot_be_compared(tmp_path, capsys):
    good = make_case({}, {"seed": 1})
    board = SweepProgress(sys.stdout)
    with board.live([good], 1):
        board.begins(good, 0)
        board.ended(good, 0, read_run(write_run(tmp_path / "run", link=LINK)), seconds=1.25)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"[1/1] {good.name[:6]}  seed 1  run 1  done in 1.2 s  step 100.0 ms  640 tok/s  exposed 30%"
    )
    assert line.endswith("not comparable: bandwidth: off")
