"""A run on a pseudo-terminal, and its end by Ctrl-C."""

from __future__ import annotations

import re

from terminal import record
from zeroshard.errors import ExitStatus

FLAGS = (
    "--data.source synthetic --data.max-tokens 6000 --data.dir tokens --device cpu --seq-len 16 --micro-batch-size 2 "
    "--model.n-layer 1 --model.n-embd 16 --model.n-head 2 --max-steps 1000000 --eval-interval 0 "
    "--checkpoint-interval 5 --no-checkpoint-async --keep-checkpoints 1 --log-interval 5 --out run"
)


def test_an_interrupted_run_leaves_its_history_and_a_clean_terminal(tmp_path):
    words = ["-m", "zeroshard", "train", *FLAGS.split()]
    status, screen = record(words, 60, tmp_path, interrupt_at="step 20  loss")
    assert status == ExitStatus.INTERRUPTED
    (run,) = [line for line in screen.shown if line.startswith("run ")]
    assert run.split() == ["run", "run,", "1,000,000", "steps"]
    said = re.findall(r"^step (\d+)  (loss|checkpoint) (?:\d|run/)", "\n".join(screen.shown), re.MULTILINE)
    assert [step for step, what in said if what == "loss"][:5] == ["1", "5", "10", "15", "20"]
    assert ("5", "checkpoint") in said
    assert "Traceback" not in "\n".join(screen.shown)
    said, command = screen.shown[-2:]
    assert re.fullmatch(r"stopped at step \d+, saved; continue with:", said)
    assert command == "zeroshard train --config run/config.toml --resume auto"
