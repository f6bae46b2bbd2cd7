"""The dashboard without a browser: what it reads, who may ask, how it begins and ends."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from importlib import util
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import forked
from fuzz_material import spoiled
from run_folders import write_run, write_sweep
from zeroshard.cli import main

pytest.importorskip("dash", reason="the extra `dashboard` is not installed")

from zeroshard.lab.dashboard import all_runs_page, run_table, step_curves
from zeroshard.lab.dashboard.app import make_app
from zeroshard.lab.dashboard.planner import answer
from zeroshard.lab.dashboard.request_validation import UPDATE, refuser
from zeroshard.lab.dashboard.watch import Watch


def test_runs_are_found_by_their_place_and_read_again_only_when_they_change(tmp_path, monkeypatch):
    write_run(tmp_path / "a")
    write_run(tmp_path / "deep" / "b")
    watch = Watch(tmp_path)
    first = watch.runs()
    assert list(first) == ["a", "deep/b"]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"event": "eval", "step": 10, "loss": 3.0}) + "\n")
    second = watch.runs()
    assert second["a"] is not first["a"]
    assert second["deep/b"] is first["deep/b"]


def test_a_run_that_begins_and_ends_changes_its_state(tmp_path):
    folder = write_run(tmp_path / "a")
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").unlink()
    watch = Watch(tmp_path)
    with (folder / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert watch.runs()["a"].run.state == "running"
    assert watch.runs()["a"].run.state == "unfinished"
    (folder / "summary.json").write_text(summary)
    assert watch.runs()["a"].run.state == "done"


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    secret = write_run(tmp_path / "outside" / "secret")
    inside = tmp_path / "runs"
    write_run(inside / "own")
    (inside / "folder").symlink_to(secret)
    (inside / "files").mkdir()
    (inside / "files" / "config.toml").symlink_to(secret / "config.toml")
    assert list(Watch(inside).runs()) == ["own"]


def test_the_latest_runs_are_shown_first_those_that_run(tmp_path):
    folders = [write_run(tmp_path / f"run{index}") for index in range(8)]
    for index, folder in enumerate(folders):
        os.utime(folder / "metrics.jsonl", (index, index))
    (folders[0] / "summary.json").unlink()
    with (folders[0] / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = run_table.latest(Watch(tmp_path).runs())
    assert names == ["run0", "run7", "run6", "run5", "run4", "run3"]


def test_figures_and_plans_come_from_runs_whole_and_damaged(tmp_path):
    write_sweep(tmp_path / "sweep", bandwidths=("1Gbit/s",))
    (write_run(tmp_path / "damaged") / "config.toml").write_text("= 3")
    watch = Watch(tmp_path)
    found = watch.runs()
    parts = all_runs_page.parts_of_page(found, watch.whole(found), step_curves.AS_WRITTEN, root="x", num_unread=0)
    page = {name: part.whole() for name, part in parts.items()}
    for name in all_runs_page.GRAPHS:
        assert len(page[f"graph-{name}"]["data"]) >= 5
    assert "step" in str(page["plans"])
    assert "1.075" in str(page["plans"])
    assert "does not parse" in str(page["table"])
    called = run_table.labels({name: seen.run for name, seen in found.items()})
    assert sorted(called.values()) == ["damaged", *(f"zero{stage}, run 1" for stage in range(4))]
    assert "4 done, 1 damaged" in page["summary"]
    empty = all_runs_page.parts_of_page({}, {}, step_curves.AS_WRITTEN, root="x", num_unread=0)
    assert all(empty[f"graph-{name}"].whole()["data"] == [] for name in all_runs_page.GRAPHS)


def test_the_benchmark_of_the_first_page_and_of_refreshes_runs_to_its_end():
    program = Path(__file__).parents[3] / "benchmarks" / "dashboard.py"
    command = [sys.executable, str(program), "--runs", "3", "--steps", "60", "--limit", "1000"]
    done = forked.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    told = [line.split("  ")[1].strip() for line in done.stdout.splitlines()[1:]]
    assert told == ["imports", "first page", "nothing new", "a step", "every run"]


def test_the_planner_answers_as_the_command_does(capsys):
    given = {"model": "gpt2-124m", "gpu": "h100-80gb", "gpus": 4, "gpus_per_node": 8, "network": "10Gbit/s"}
    given |= {"stage": "all", "micro_batch": 1, "seq_len": 256}
    advice = answer(given)[0].children
    words = ["--model", "gpt2-124m", "--gpus", "4", "--network", "10Gbit/s", "--micro-batch", "1", "--seq-len", "256"]
    assert main(["plan", *words]) == 0
    assert advice in capsys.readouterr().out
    drawn = answer(given)[2].children[0].children[1].children.figure
    assert drawn["layout"]["xaxis"]["ticktext"] == [f"stage {stage}, 1" for stage in range(4)]
    assert str(answer({**given, "network": "10furlongs"})[0].children).startswith("network: ")


def _start(folder, *words):
    command = [sys.executable, "-m", "zeroshard", "dashboard", str(folder), "--port", "0", *words]
    child = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().split("  ")[0]


def _get(url, **headers):
    with urlopen(Request(url, headers=headers), timeout=600) as response:
        return response.status, response.headers, response.read().decode()


def _text(url):
    try:
        return _get(url)[2]
    except HTTPError as refusal:
        return refusal.read().decode()


@pytest.mark.slow
def test_it_serves_loopback_alone_and_ends_with_the_signals_status(tmp_path):
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "secret.txt").write_text("secret")
    child, url = _start(tmp_path / "runs")
    try:
        assert url.startswith("http://127.0.0.1:")
        status, headers, _ = _get(url)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        with pytest.raises(HTTPError, match="403"):
            _get(url, Host="evil.example")
        for path in (
            "/../secret.txt",
            "/assets/../../secret.txt",
            "/assets/%2e%2e/%2e%2e/server.py",
            "/runs/a/config.toml",
        ):
            assert "secret" not in _text(url + path)
    finally:
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=600)
    assert (child.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "error: dir: nowhere is not a folder; give the folder that your runs are in, as runs"),
        ([], "error: dir: needs one folder, of runs; write zeroshard dashboard DIR [--host ADDRESS] [--port N]"),
        ([".", "--port", "x"], "error: port: 'x' is no port; give a number below 65536; 0: any that is free"),
    ],
)
def test_what_cannot_be_served_is_one_line(capsys, words, line):
    assert main(["dashboard", *words]) == 2
    assert capsys.readouterr().err == f"{line}\n"


def test_without_the_extra_there_is_one_line(tmp_path, monkeypatch, capsys):
    find = util.find_spec
    monkeypatch.setattr("zeroshard.lab.report.command.find_spec", lambda name: None if name == "dash" else find(name))
    assert main(["dashboard", str(tmp_path)]) == 2
    expected = 'error: dashboard: needs dash, not installed here; pip install "zeroshard[dashboard]"\n'
    assert capsys.readouterr().err == expected


def _good_bodies(client):
    """What Dash's script in the page sends for each callback when the page opens."""
    for known in client.get("/_dash-dependencies").get_json():
        spec = known["output"]
        outputs = [
            dict(zip(("id", "property"), each.rsplit(".", 1), strict=True)) for each in spec.strip(".").split("...")
        ]
        values = {"clock": None, "chosen": None, "one-run": None, "tabs": "runs"}
        yield {
            "output": spec,
            "outputs": outputs if spec.startswith("..") else outputs[0],
            "inputs": [{**each, "value": values.get(each["id"], 1)} for each in known["inputs"]],
            "changedPropIds": [],
            "state": [{**each, "value": None} for each in known["state"]],
        }


def test_what_no_control_sends_is_refused_and_never_an_error_of_the_server(tmp_path):
    write_run(tmp_path / "a")
    app = make_app(tmp_path)
    app.server.before_request(refuser(app))
    app.server.config["PROPAGATE_EXCEPTIONS"] = False
    client, rng, statuses = app.server.test_client(), random.Random(0), []

    def post(data):
        return client.post(UPDATE, data=data, content_type="application/json").status_code

    for good in _good_bodies(client):
        assert post(json.dumps(good)) == 200
        statuses += [post(json.dumps(spoiled(json.loads(json.dumps(good)), rng))) for _ in range(60)]
    statuses += [
        post(data) for data in (b"", b"{", b"[]", b"[" * 100_000, b"null", b"\xff", b"{}", b'"' + b"x" * 2**21)
    ]
    assert set(statuses) <= {200, 400, 413}
    assert statuses.count(400) > 60
