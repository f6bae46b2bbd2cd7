"""Records: always valid JSON, plain lines where nobody watches, and nothing invented."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from zeroshard.train.records.console import ERASE, GIB, ConsoleRecorder, facts_of
from zeroshard.train.records.log_files import LogFiles, finite_or_null
from zeroshard.train.records.records import StepRecord


def a_record(**changes) -> StepRecord:
    values: dict[str, Any] = {
        "step": 10,
        "loss": 4.12341,
        "grad_norm": 0.98,
        "lr": 3e-4,
        "step_s": 0.1,
        "tokens": 20_480,
        "tokens_per_s": 12_345.4,
    }
    return StepRecord(**values | changes)


def read_lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_event_is_a_line_that_is_there_before_the_next_one(tmp_path):
    path, writer = tmp_path / "metrics.jsonl", LogFiles(tmp_path)
    for call, event in [
        (lambda: writer.on_start({"world_size": 2}), {"event": "start", "world_size": 2}),
        (lambda: writer.on_eval(10, {"val_loss": 2.5}), {"event": "eval", "step": 10, "loss": 2.5}),
        (
            lambda: writer.on_eval(11, {"val_loss": 2.5, "ema_val_loss": 2.25}),
            {"event": "eval", "step": 11, "loss": 2.5, "ema_loss": 2.25},
        ),
        (lambda: writer.on_checkpoint(10, Path("c")), {"event": "checkpoint", "step": 10, "path": "c"}),
        (
            lambda: writer.on_checkpoint(10, Path("c"), {"stall_s": 0.5}),
            {"event": "checkpoint", "step": 10, "path": "c", "stall_s": 0.5},
        ),
        (
            lambda: writer.on_checkpoint(20, Path("c"), {"error": "full"}),
            {"event": "checkpoint", "step": 20, "path": "c", "error": "full"},
        ),
        (lambda: writer.on_end({"loss": 1.0}), {"event": "end", "loss": 1.0}),
    ]:
        call()
        assert read_lines(path)[-1] == event
    writer.close()


def test_a_step_line_holds_every_fact_of_the_record(tmp_path):
    writer = LogFiles(tmp_path)
    exposed_s = {"blocks.0/weights/forward": 0.5, "blocks.1/weights/forward": 0.25, "control": 2.0}
    writer.on_step(a_record(memory_bytes={"params": 8}, comm={"all_gather": 4}, exposed_s=exposed_s))
    writer.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line == {
        "event": "step",
        "step": 10,
        "loss": 4.12341,
        "grad_norm": 0.98,
        "lr": 3e-4,
        "step_s": 0.1,
        "tokens": 20_480,
        "tokens_per_s": 12_345.4,
        "mfu": None,
        "memory_bytes": {"params": 8},
        "comm": {"all_gather": 4},
        "skipped": False,
        "why_skipped": "",
        "num_skipped": 0,
        "loss_scale": None,
        "exposed_s": {"weights/forward": 0.75, "control": 2.0},
        "spans_s": {},
        "hfu": None,
    }


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path):
    writer = LogFiles(tmp_path)
    writer.on_step(a_record(loss=float("nan"), grad_norm=float("inf"), comm={"send": {"s": float("-inf")}}))
    writer.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"], line["comm"]) == (None, None, {"send": {"s": None}})
    assert finite_or_null([1, 2.5, "x", True, (float("nan"),)]) == [1, 2.5, "x", True, [None]]


def test_a_resumed_run_appends_and_cuts_off_a_line_that_a_kill_tore(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "start"}\n{"event": "st')
    writer = LogFiles(tmp_path)
    writer.on_eval(1, {"val_loss": 2.0})
    writer.close()
    assert [line["event"] for line in read_lines(path)] == ["start", "eval"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_log_that_is_removed_in_mid_run_is_made_again_with_a_warning(is_replaced, tmp_path, capsys):
    path, writer = tmp_path / "metrics.jsonl", LogFiles(tmp_path)
    writer.on_eval(1, {"val_loss": 2.0})
    if is_replaced:  # as an editor does
        (tmp_path / "draft").write_text('{"event": "eval", "step": 1}\n')
        (tmp_path / "draft").rename(path)
    else:
        path.unlink()
    writer.on_eval(2, {"val_loss": 2.0})
    writer.on_eval(3, {"val_loss": 2.0})
    writer.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3][not is_replaced :]
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"{path} was removed or replaced while the run was writing there" in warning


def test_a_log_whose_folder_is_another_runs_is_not_made_again(tmp_path, capsys):
    def refuse():
        raise OSError("it is another run's")

    writer = LogFiles(tmp_path, None, refuse)
    (tmp_path / "metrics.jsonl").unlink()
    writer.on_eval(2, {"val_loss": 2.0})
    writer.close()
    assert not any(tmp_path.iterdir())
    assert "cannot be written (it is another run's); the run continues without its log" in capsys.readouterr().err


def test_the_summary_appears_whole_at_the_end_with_the_mean_exposed_time_of_each_unit_without_the_first_step(tmp_path):
    summary, writer = tmp_path / "summary.json", LogFiles(tmp_path)
    writer.on_start({})
    for seconds in (100.0, 1.0, 3.0):
        writer.on_step(a_record(exposed_s={"blocks.0/grads/backward": seconds, "blocks.1/grads/backward": 2 * seconds}))
    assert not summary.exists()
    writer.on_end({"loss": float("nan"), "step": 3})
    writer.close()
    found = json.loads(summary.read_text())
    exposed = {"blocks.1/grads/backward": 4.0, "blocks.0/grads/backward": 2.0}
    assert found == {"loss": None, "step": 3, "exposed_s_per_step": exposed}
    assert next(iter(found["exposed_s_per_step"])) == "blocks.1/grads/backward"
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", "metrics.jsonl"}


def test_a_step_in_words_names_only_what_is_known():
    plain = ["loss 4.1234", "grad_norm 0.98", "lr 3.0e-04", "12,345 tok/s"]
    assert facts_of(a_record()) == plain
    known = {"memory_bytes": {"params": 10 * GIB, "grads": GIB // 10}, "exposed_s": {"a": 0.002, "b": 0.001}}
    assert facts_of(a_record(mfu=0.412, **known)) == [*plain, "mfu 41.2%", "mem 10.1GiB", "comm 3%"]
    assert facts_of(a_record(loss_scale=32768.0, num_skipped=2))[4:] == ["scale 32768", "skipped 2"]


def test_a_run_is_a_line_at_the_first_the_last_and_each_interval_and_for_each_event():
    stream = io.StringIO()
    console = ConsoleRecorder(max_steps=7225, log_interval=10, stream=stream, next_command="zeroshard report run")
    about = {"batch": "1 x 2", "data": "[bold]"}
    console.on_start({"world_size": 2, "about": about, "kernels": {"LayerNorm": "triton"}, "link": {}})
    for step in (*range(1, 26), 7225):
        console.on_step(a_record(step=step, step_s=100.0 if step == 1 else 0.5))
    console.on_eval(25, {"val_loss": 2.25, "ema_val_loss": 2.5})
    console.on_checkpoint(25, Path("runs/x/checkpoints/step-25"))
    console.on_end({"status": "ok", "loss": 2.0, "memory": {"params": 1}})
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["batch    1 x 2", "data     [bold]", "kernels  LayerNorm: triton"]
    facts = "loss 4.1234  grad_norm 0.98  lr 3.0e-04  12,345 tok/s"
    assert lines[3:7] == [
        f"step 1  {facts}",
        f"step 10  {facts}  eta 1:00:08",
        f"step 20  {facts}  eta 1:00:02",
        f"step 7225  {facts}",
    ]
    assert lines[7:] == [
        "step 25  val_loss 2.2500  ema_val_loss 2.5000",
        "step 25  checkpoint runs/x/checkpoints/step-25",
        "status ok  loss 2",
        "next: zeroshard report run",
    ]


def test_a_console_that_is_closed_is_written_nowhere(monkeypatch, capfd):
    monkeypatch.setattr("sys.stdout", None)
    console = ConsoleRecorder(max_steps=2)
    console.on_step(a_record(step=1))
    console.on_end({"status": "ok"})
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_each_step_replaces_a_line_that_gives_way_to_others(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = type("Terminal", (io.StringIO,), {"isatty": lambda self: True})()
    console = ConsoleRecorder(max_steps=100, log_interval=4, stream=stream)
    for step in range(1, 5):
        console.on_step(a_record(step=step, step_s=0.5))
    facts = "loss 4.1234  grad_norm 0.98  lr 3.0e-04  12,345 tok/s"
    live = [f"{ERASE}step {n} of 100  loss 4.1234  12,345 tok/s  eta 0:00:{49 if n == 2 else 48}" for n in (2, 3)]
    assert stream.getvalue() == f"step 1  {facts}\n{''.join(live)}{ERASE}step 4  {facts}  eta 0:00:48\n"


def test_in_a_pipe_no_ten_seconds_pass_without_a_line(monkeypatch):
    clock, stream = iter((0.0, 0.0, 9.0, 10.5, 10.5, 19.0)), io.StringIO()
    monkeypatch.setattr("zeroshard.train.records.console.time.monotonic", lambda: next(clock))
    console = ConsoleRecorder(max_steps=100, log_interval=50, stream=stream)
    console.on_eval(0, {"val_loss": 2.0})
    for step in (2, 3, 4):
        console.on_step(a_record(step=step))
    assert [line.partition("  ")[0] for line in stream.getvalue().splitlines()] == ["step 0", "step 3"]


def test_the_end_of_a_run_says_what_is_not_as_it_should_be():
    stream = io.StringIO()
    console = ConsoleRecorder(max_steps=100, stream=stream, next_command="zeroshard generate run")
    ended = {"step": 16, "val_loss": None, "num_skipped": 0, "last_checkpoint_step": 16, "wall_s": 3723.4}
    console.on_end({"status": "ok", **ended})
    console.on_end({"status": "storage", **ended, "num_skipped": 3, "last_checkpoint_step": 2})
    assert stream.getvalue().splitlines() == [
        "status ok  step 16  time 1:02:03",
        "next: zeroshard generate run",
        "status storage  step 16  num_skipped 3  last_checkpoint_step 2  time 1:02:03",
    ]


@pytest.mark.parametrize("fails", ["flush", "write"])
def test_a_console_that_nobody_reads_ends_no_run(fails, capsys):
    def broken(*args: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    stream = type("NobodyReads", (io.StringIO,), {fails: broken})()
    console = ConsoleRecorder(max_steps=2, stream=stream)
    console.on_eval(1, {"val_loss": 2.0})
    console.on_eval(2, {"val_loss": 2.0})
    said = "warning: the console cannot be written (Broken pipe); the run continues, and its folder has the rest\n"
    assert capsys.readouterr().err == said
