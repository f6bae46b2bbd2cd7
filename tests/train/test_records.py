"""Records: always valid JSON, plain lines where nobody watches, and nothing invented."""

from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from terminal import Screen
from zeroshard.train.records import console as console_module
from zeroshard.train.records.console import GIB, ConsoleRecorder, bytes_in_words, facts_of, link_in_words, start_lines
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
        (lambda: writer.on_eval(10, 2.5), {"event": "eval", "step": 10, "loss": 2.5}),
        (lambda: writer.on_eval(11, 2.5, 2.25), {"event": "eval", "step": 11, "loss": 2.5, "ema_loss": 2.25}),
        (lambda: writer.on_checkpoint(10, Path("c")), {"event": "checkpoint", "step": 10, "path": "c"}),
        (
            lambda: writer.on_checkpoint(10, Path("c"), {"stall_s": 0.5}),
            {"event": "checkpoint", "step": 10, "path": "c", "stall_s": 0.5},
        ),
        (
            lambda: writer.on_checkpoint_failed(20, Path("c"), "full"),
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
    writer.on_eval(1, 2.0)
    writer.close()
    assert [line["event"] for line in read_lines(path)] == ["start", "eval"]


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


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0B"), (12, "12B"), (4096, "4.0KiB"), (5 << 20, "5.0MiB"), (GIB, "1.0GiB")]
)
def test_bytes_in_words(num_bytes, words):
    assert bytes_in_words(num_bytes) == words


def test_a_pipe_gets_plain_lines_at_the_first_the_last_and_each_interval():
    stream = io.StringIO()
    with closing(ConsoleRecorder(max_steps=25, log_interval=10, stream=stream)) as console:
        about = {"batch": "1 x 2", "data": "[bold]"}
        console.on_start({"world_size": 2, "about": about, "kernels": {"LayerNorm": "triton"}, "link": {}})
        for step in range(1, 26):
            console.on_step(a_record(step=step))
        console.on_eval(25, 2.25)
        console.on_checkpoint(25, Path("runs/x/checkpoints/" + "long-name-" * 20))
        console.on_end({"loss": 2.0, "memory": {"params": 1}})
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["batch    1 x 2", "data     [bold]", "kernels  LayerNorm: triton"]
    assert [line.split("  ")[0] for line in lines[3:7]] == ["step 1", "step 10", "step 20", "step 25"]
    assert lines[7] == "step 25  val_loss 2.2500"
    assert lines[8].endswith("long-name-" * 20)
    assert lines[9:] == ["loss 2"]
    assert "\x1b" not in stream.getvalue()


ABOUT = {"run": "runs/" + "a-long-name-" * 8, "strategy": "zero2: optimizer states and gradients sharded over 2 ranks"}
CHECKPOINT = Path("runs/gpt2-demo-tinyshakespeare-zero2/checkpoints/step-00000010")


def a_run_on(screen: Screen, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(screen.width))
    with closing(ConsoleRecorder(max_steps=100_000, log_interval=10, stream=screen)) as console:
        console.on_start({"step": 0, "world_size": 2, "about": ABOUT, "plan": "fits"})
        for step in range(1, 21):
            known = {"mfu": 0.412, "memory_bytes": {"params": GIB}, "exposed_s": {"a": 0.01}}
            console.on_step(a_record(step=step, tokens_per_s=1_234_567.0, **known))
        console.on_eval(20, 2.25, 2.5)
        console.on_saving(2**20, 2**22)
        console.on_checkpoint(20, CHECKPOINT)
        console.on_end(
            {"status": "ok", "step": 20, "loss": 4.12341, "tokens": 20_480, "wall_s": 12.5, "num_skipped": 0}
        )


STEP_LINES = {
    60: "loss 4.1234  grad_norm 0.98  1,234,567 tok/s",
    80: "loss 4.1234  grad_norm 0.98  lr 3.0e-04  1,234,567 tok/s  mfu 41.2%",
    120: "loss 4.1234  grad_norm 0.98  lr 3.0e-04  1,234,567 tok/s  mfu 41.2%  mem 1.0GiB  comm 10%",
}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_terminal_keeps_a_history_and_no_line_is_wider_than_it(width, monkeypatch):
    screen = Screen(width)
    a_run_on(screen, monkeypatch)
    assert screen.wrapped == []
    assert screen.cursor_shown
    facts = STEP_LINES[width]
    path = CHECKPOINT if width == 120 else CHECKPOINT.name
    bar = next(line for line in screen.shown if "eta" in line)
    assert [line for line in screen.shown if line.startswith("step ")] == [
        f"step 1  {facts}",
        f"step 10  {facts}",
        f"step 20  {facts}",
        "step 20  val_loss 2.2500  ema_val_loss 2.5000",
        f"step 20  checkpoint {path}",
    ]
    assert (bar.split()[0], bar.split()[-2:]) == ("20/100000", ["loss", "4.1234"])
    assert "1,234,567 tok/s" in bar
    assert len(bar) == width - len("^C")
    if width == 60:  # a long line of the start continues below its text
        begins = ["strategy  zero2: optimizer states and gradients sharded over", "          2 ranks", "plan      fits"]
        assert screen.shown[3:6] == begins


def test_the_pace_of_a_resumed_run_is_not_that_of_the_steps_before(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = ConsoleRecorder(max_steps=2000, stream=Screen(80))
    console.on_start({"step": 1000})
    console.close()
    (task,) = console._bar.tasks
    assert (task.completed, task.speed) == (1000, None)


LINK = {
    "mode": "simulated", "node_size": 1, "asked_bytes_per_s": 25e6, "asked_latency_s": 1e-3,
    "achieved_bytes_per_s": 24.9e6, "achieved_latency_s": 1.02e-3, "comparable": True, "why_not_comparable": "",
}  # fmt: skip


def test_a_link_is_told_in_the_units_of_networks():
    told = "simulated between nodes of 1 rank, 200 Mbit/s, 1 ms; measured 199.2 Mbit/s, 1.02 ms"
    assert link_in_words(LINK) == told
    unlimited = {**LINK, "asked_bytes_per_s": None, "node_size": 2, "why_not_comparable": "too slow"}
    told = (
        "simulated between nodes of 2 ranks, unlimited, 1 ms; measured 199.2 Mbit/s, 1.02 ms; not comparable: too slow"
    )
    assert link_in_words(unlimited) == told
    assert start_lines({"link": {}}) == []


@pytest.fixture
def a_wide_screen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Screen(80)


def test_the_bar_says_how_much_of_a_checkpoint_is_written(a_wide_screen):
    with closing(ConsoleRecorder(30, stream=a_wide_screen)) as console:

        def bar() -> str:
            console._bar.refresh()
            return a_wide_screen.shown[-1]

        console.on_start({"max_steps": 30})
        console.on_saving(2**20, 2**22)
        assert "saving 25%" in bar()
        console.on_checkpoint(10, Path("c"))
        assert "eta" in bar()
        console.on_saving(2**20, 2**22)
        assert "saving 25%" in bar()
        console.on_checkpoint_failed(20, Path("c"), "full")
        assert "eta" in bar()
    assert "step 10  checkpoint c" in a_wide_screen.shown


def test_no_line_is_lost_to_a_bar_that_is_drawn_beside_it(a_wide_screen, monkeypatch):
    """rich's thread draws without pause: were the bar of two lines at times, most of these runs would lose some."""
    monkeypatch.setattr(console_module, "REFRESHES_PER_S", 5000)
    with closing(ConsoleRecorder(1000, stream=a_wide_screen)) as console:
        console.on_start({"step": 0})
        for step in range(1, 201):
            console.on_saving(1, 4)
            console.on_checkpoint(step, Path("c"))
    assert [line for line in a_wide_screen.shown if "checkpoint" in line] == [
        f"step {step}  checkpoint c" for step in range(1, 201)
    ]
    assert "\x1b[1A" not in a_wide_screen.written  # the cursor never goes up


def test_a_log_that_was_removed_is_made_anew(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = LogFiles(path.parent)
    writer.on_eval(1, 2.5)
    path.unlink()
    path.parent.rmdir()
    writer.on_eval(2, 2.5)
    writer.close()
    assert [line["step"] for line in read_lines(path)] == [2]


@pytest.mark.parametrize("fails", ["flush", "write"])
def test_a_console_that_nobody_reads_ends_no_run(fails, capsys):
    def broken(*args: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    stream = type("NobodyReads", (io.StringIO,), {fails: broken})()
    with closing(ConsoleRecorder(max_steps=2, stream=stream)) as console:
        console.on_start({"step": 0})
        console.on_eval(1, 2.0)
    said = "warning: the console cannot be written (Broken pipe); the run continues, and its folder has the rest\n"
    assert capsys.readouterr().err == said
