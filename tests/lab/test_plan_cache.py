"""Plans that are kept: answered without a model, never for another question, and only where whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroshard import process
from zeroshard.cli import main
from zeroshard.errors import UserError
from zeroshard.lab.planner import command, plan_cache
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.plan_cache import PlanAnswer, answered
from zeroshard.lab.predict.hardware import find_device, write_calibration

WORDS = ["plan", "--model", "gpt2-demo", "--stage", "3", "--micro-batch", "1"]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zeroshard" / "plans"


class Computed:
    """Counts how often it was asked."""

    def __init__(self, status: int = 0) -> None:
        self.asked, self.status = list[PlanConfig](), status

    def __call__(self, config: PlanConfig) -> PlanAnswer:
        self.asked.append(config)
        return PlanAnswer(self.status, f"answer {len(self.asked)}")


def config(**changes) -> PlanConfig:
    return PlanConfig.model_validate({"model": {"name": "gpt2-demo"}, **changes})


def test_a_kept_answer_builds_no_model(monkeypatch, capsys):
    status = main(WORDS)
    first = capsys.readouterr().out
    monkeypatch.setattr(command, "answer_plan", None)  # a call would fail
    assert main(WORDS) == status
    assert capsys.readouterr().out == first


def test_a_status_is_kept_with_its_text():
    computed = Computed(status=3)
    assert [answered(config(), computed) for _ in range(2)] == [PlanAnswer(3, "answer 1")] * 2
    assert len(computed.asked) == 1


# One change for each setting of a plan; a new setting has to get its line here.
CHANGES = {
    "model": {"name": "gpt2-demo", "n_layer": 3}, "gpus": 2, "gpu": "a100-80gb", "gpus_per_node": 4,
    "network": "100Gbit/s", "within_node": "10GB/s", "seq_len": 64, "global_batch": 8, "micro_batch": 2, "stage": "1",
    "shard_size": 1, "dtype": "float32", "reduce_dtype": "bfloat16", "optimizer": "sgd", "accumulate": "local",
    "prefetch": 2, "reshard_after_forward": False, "kernels": "reference", "document_mask": True, "headroom": 0.1,
    "impl": "eager", "attention": "flash-3", "json": True, "explain": True, "ask": "fewest-gpus", "against": "1",
    "compile": True, "autocast": True, "master_weights": False, "optimizer_in_backward": True,
    "offload": "optimizer", "tensor_parallel": 2, "context_parallel": 2, "pipeline_parallel": 2, "price": "2/h",
    "tokens": 10**9, "lora": {"rank": 8}, "replicas": {"every": 4},
    "wire": {"grads": "int8"}, "node_copy": 2, "rails": 4, "oversubscription": 2.0, "pod_nodes": 2,
    "reproducible": 2,
}  # fmt: skip
WITH = {"replicas": {"shard_size": 1}, "pod_nodes": {"oversubscription": 2.0}}  # what a setting needs beside it


def test_every_setting_is_part_of_the_key():
    assert set(CHANGES) == set(PlanConfig.model_fields) - {"cache", "dry_run", "dry_run_values"}
    computed = Computed()
    answered(config(), computed)
    for name, value in CHANGES.items():
        answered(config(**{name: value}, **WITH.get(name, {})), computed)
    assert len(computed.asked) == 1 + len(CHANGES)


@pytest.mark.parametrize(
    "changes", [{"cache": False}, {"dry_run": True}, {"kernels": "triton"}, {"optimizer": "mine:Optimizer"}]
)
def test_what_depends_on_more_than_the_key_is_never_kept(changes, folder):
    computed = Computed()
    for _ in range(2):
        answered(config(**changes), computed)
    assert len(computed.asked) == 2
    assert not folder.exists()


def test_an_answer_of_other_sources_or_another_torch_is_not_taken(monkeypatch):
    computed = Computed()
    answered(config(), computed)
    monkeypatch.setattr(plan_cache, "version", lambda name: "another")
    answered(config(), computed)
    monkeypatch.setattr(plan_cache, "sources_sha256", lambda: "others")
    answered(config(), computed)
    assert len(computed.asked) == 3


def test_a_device_file_that_changed_is_another_question(tmp_path):
    computed = Computed()
    for gpu in ("h100-80gb", "a100-80gb"):
        write_calibration(tmp_path / "device.json", find_device(gpu))
        answered(config(gpu=str(tmp_path / "device.json")), computed)
    assert len(computed.asked) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[]", b'{"status": 0, "text": "wrong", "sha256": "0"}'])
def test_a_damaged_entry_is_ignored_and_replaced(damage, folder):
    computed = Computed()
    answered(config(), computed)
    (entry,) = folder.iterdir()
    entry.write_bytes(damage)
    assert answered(config(), computed).text == "answer 2"
    assert answered(config(), computed).text == "answer 2"
    assert json.loads(entry.read_text())["text"] == "answer 2"
    assert len(computed.asked) == 2


def test_a_folder_that_cannot_be_had_costs_the_cache_alone(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    computed = Computed()
    assert [answered(config(), computed).text for _ in range(2)] == ["answer 1", "answer 2"]


def test_nothing_is_kept_of_what_was_refused(folder):
    def refuse(config: PlanConfig) -> PlanAnswer:
        raise UserError("model", "no", "another")

    with pytest.raises(UserError):
        answered(config(), refuse)
    assert not folder.exists()


def test_the_oldest_answers_are_forgotten(monkeypatch, folder):
    monkeypatch.setattr(plan_cache, "MOST_ENTRIES", 2)
    for gpus in (1, 2, 3, 4):
        answered(config(gpus=gpus), Computed())
    assert len(list(folder.iterdir())) == 2


def test_a_relative_cache_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert process.cache_folder() == tmp_path / ".cache" / "zeroshard"
