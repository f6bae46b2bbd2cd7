"""Processor time of the dashboard over a folder of runs; status 1 where the first page takes more than --limit seconds.

The folder is made here: runs of as many steps, each with its configuration, a log with the keys of a trainer's, a
summary. The server's application is asked as Dash's script in the page asks it, in this process, and its processor
time is taken: the network of this host and the browser are no part of it. Imports are, and are told apart.

    python benchmarks/dashboard.py [--runs 300] [--steps 1000] [--limit 2]

What is measured: *first page* is all that a browser asks for until every table and figure is there; *nothing new* a
tick of the page's clock without a change; *a step* a tick after one run has written a line, *every run* after each has
written ten.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from run_folders import write_run

KINDS = ("weights/forward", "weights/backward", "grads/backward", "norm", "control")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds of the first page")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        texts = ["".join(_line(step, seed) for step in range(1, asked.steps + 1)) for seed in range(4)]
        logs = [_write(root / f"run-{index:03}", texts[index % len(texts)]) for index in range(asked.runs)]
        num_bytes = sum(log.stat().st_size for log in logs)
        print(f"{asked.runs} runs of {asked.steps} steps, {num_bytes / 1e6:.0f} MB of logs; processor time in seconds")
        began = time.process_time()
        from zeroshard.lab.dashboard.app import make_app

        print(f"  imports       {time.process_time() - began:6.2f}")
        page = Page(lambda: make_app(root, time.process_time))  # as on a machine that does nothing else
        first_s = page.told("first page", page.open)
        page.told("nothing new", page.tick)
        _append(logs[-1], asked.steps + 1)
        page.told("a step", page.tick)
        for index, log in enumerate(logs):
            for step in range(10):
                _append(log, asked.steps + 2 + step + index)
        page.told("every run", page.tick)
    return int(first_s > asked.limit)


class Page:
    """What a browser asks of an application: each callback, whose answers are the next ones' state."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._values = make, dict[tuple[str, str], Any]()
        self._num_ticks = 0
        self.num_bytes = self.num_answers = 0

    def open(self) -> None:
        """The page, its layout, and all callbacks until nothing more is to be asked."""
        self._client = self._make().server.test_client()
        for path in ("/", "/_dash-layout"):
            self._client.get(path)
        self._take(self._client.get("/_dash-layout").get_json())
        self._callbacks = self._client.get("/_dash-dependencies").get_json()
        for callback in self._callbacks:
            self._ask(callback)
        while self._is_reading():
            self.tick()

    def tick(self) -> None:
        """The clock of the page."""
        self._num_ticks += 1
        self._values["clock", "n_intervals"] = self._num_ticks
        for callback in self._callbacks:
            if any(each["id"] == "clock" for each in callback["inputs"]):
                self._ask(callback)

    def told(self, what: str, do: Callable[[], None]) -> float:
        """Do it, print what it took, and return that."""
        began, self.num_bytes, self.num_answers = time.process_time(), 0, 0
        do()
        took = time.process_time() - began
        print(f"  {what:<12} {took:7.3f}, {self.num_bytes / 1e3:,.0f} kB sent in {self.num_answers} answers")
        return took

    def _is_reading(self) -> bool:
        return "being read" in str(self._values.get(("summary", "children")))

    def _take(self, part: Any) -> None:
        """Remember the properties of the components in ``part``."""
        if isinstance(part, list):
            for each in part:
                self._take(each)
        elif isinstance(part, dict):
            props = part.get("props", {})
            for name, value in props.items():
                if "id" in props:
                    self._values[props["id"], name] = value
                self._take(value)

    def _ask(self, callback: dict[str, Any]) -> None:
        spec = callback["output"]
        outputs = [dict(zip(("id", "property"), e.rsplit(".", 1), strict=True)) for e in spec.strip(".").split("...")]
        known = {
            part: [{**each, "value": self._values.get((each["id"], each["property"]))} for each in callback[part]]
            for part in ("inputs", "state")
        }
        body = {"output": spec, "outputs": outputs if spec.startswith("..") else outputs[0], "changedPropIds": []}
        answer = self._client.post("/_dash-update-component", json={**body, **known})
        if answer.status_code == 204:  # nothing is to change
            return
        self.num_bytes += len(answer.data)
        self.num_answers += 1
        assert answer.status_code == 200, answer.data
        for name, properties in answer.get_json()["response"].items():
            for key, value in properties.items():
                self._values[name, key] = value


def _write(folder: Path, steps: str) -> Path:
    write_run(folder, num_steps=1)
    log = folder / "metrics.jsonl"
    start = {"event": "start", "step": 0, "world_size": 2, "device": "cpu", "torch": "2.13.0", "tokens_per_step": 64}
    log.write_text(json.dumps(start) + "\n" + steps, encoding="utf-8")
    return log


def _append(log: Path, step: int) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(_line(step, step))


def _line(step: int, seed: int) -> str:
    """As the trainer writes one."""
    noise = ((step * 7919 + seed * 104729) % 1000) / 1000
    step_s = 0.1 + 0.013 * noise
    facts: dict[str, Any] = {"event": "step", "step": step, "loss": 5.0 / step**0.1 + noise / 10, "lr": 1e-3 * noise}
    facts |= {"grad_norm": 1.0 + noise, "tokens": 64 * step, "tokens_per_s": 64 / step_s, "mfu": None, "step_s": step_s}
    facts["memory_bytes"] = {"params": 4_123_456, "grads": 2_061_728, "master": 2_061_728, "optimizer": 4_123_456}
    facts["comm"] = {"all_gather": 4_123_456, "reduce_scatter": 4_123_456, "all_reduce": 64}
    facts["exposed_s"] = dict.fromkeys(KINDS, 0.001 * noise)
    facts["spans_s"] = dict.fromkeys(("data", "forward", "backward", "update"), step_s / 3)
    facts |= {"skipped": False, "why_skipped": "", "num_skipped": 0, "loss_scale": None, "hfu": None}
    return json.dumps(facts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
