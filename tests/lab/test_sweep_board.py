import sys

from run_folders import LINK, write_run
from zeroshard.lab.run_folders import read_run
from zeroshard.lab.sweep.board import SweepProgress
from zeroshard.lab.sweep.cases import make_case


def test_each_run_has_a_line_with_what_cannot_be_compared_and_the_time_that_is_left(tmp_path, capsys):
    good, bad = make_case({}, {"seed": 1}), make_case({}, {"seed": 2})
    board = SweepProgress(sys.stdout)
    board.num_all = 3
    board.begins(good, 0)
    board.ended(good, 0, read_run(write_run(tmp_path / "run", link=LINK)), seconds=1.25)
    board.ended(bad, 0, read_run(tmp_path / "none"), seconds=6.75, failure="status 1: no")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"[1/3] {good.name[:6]}  seed 1  run 1  done in 1.2 s  step 100.0 ms  640 tok/s  exposed 30%"
    )
    assert first.endswith("not comparable: bandwidth: off  2 s left")
    assert second == f"[2/3] {bad.name[:6]}  seed 2  run 1  failed: status 1: no  4 s left"
