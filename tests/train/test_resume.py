"""What may change between a save and a resume, what is named in a line, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tiny_runs import built, summary_of, train_on
from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.lab.run_folders import read_run
from zeroshard.models.presets import PRESETS
from zeroshard.optim import learning_rate
from zeroshard.settings.base import OnResume
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.resume import check_changes, schedule_of
from zeroshard.train.start import run_training
from zeroshard.train.state import saved_run

CPU = torch.device("cpu")


def _saved(config, tokens_per_step=32, data="d" * 64):
    return {
        "config": config.model_dump(mode="json"),
        "position": {"tokens_per_step": tokens_per_step},
        "data_sha256": data,
    }


def _changes(before, after, tokens_per_step=32, data="d" * 64):
    return check_changes(_saved(before), after.model_dump(mode="json"), tokens_per_step, data)


def test_an_evaluation_on_other_rows_is_told_of(tiny_config):
    before, after = tiny_config(eval_rows=12, eval_batches=0), tiny_config(eval_rows=5, eval_batches=0)
    what = "an evaluation had 12 sequences, now it has 5: its losses are of another set"
    assert _changes(before, after) == [f"{what}; --eval-rows 12 keeps it"]


def test_how_a_run_is_spread_and_watched_may_change_without_a_word(tiny_config, tmp_path):
    after = tiny_config(
        strategy="zero3", comm="ring", nproc=3, micro_batch_size=1, grad_accum_steps=2, out=str(tmp_path / "other"),
        checkpoint_interval=7, checkpoint_async=False, keep_checkpoints=2, log_interval=3, resume="auto", eval_rows=6,
    )  # fmt: skip
    assert _changes(tiny_config(), after) == []
    free = {"strategy", "out", "data.dir", "offload.path", "model.activation_checkpointing"}
    assert {TrainConfig.on_resume(name) for name in free} == {OnResume.FREE}
    assert TrainConfig.on_resume("data.document_mask") is TrainConfig.on_resume("lr") is OnResume.SAID


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"weight_decay": 0.5}, "weight_decay was 0.1, now it is 0.5"),
        ({"seed": 4}, "seed was 0, now it is 4"),
        ({"dtype": "bfloat16"}, "dtype was float32, now it is bfloat16"),
        ({"seq_len": 8}, "seq_len was 16, now it is 8"),
    ],
)
def test_what_changes_the_numbers_is_named(tiny_config, change, line):
    assert _changes(tiny_config(), tiny_config(**change)) == [line]


def test_a_longer_run_is_told_what_becomes_of_its_learning_rate_and_how_to_keep_it(tiny_config):
    before, after = tiny_config(max_steps=300, warmup_steps=20), tiny_config(max_steps=600, warmup_steps=20)
    saved = {**_saved(before), "position": {"step": 300, "tokens_per_step": 32}}
    told = check_changes(saved, after.model_dump(mode="json"), 32, "d" * 64)
    assert told == [
        "max_steps was 300, now it is 600",
        "the learning rate of step 301 would have been 0.0001, now it is 0.000574; "
        "--decay-steps 300 keeps the earlier schedule, then min_lr",
    ]
    kept = tiny_config(max_steps=600, warmup_steps=20, decay_steps=300)
    assert check_changes(saved, kept.model_dump(mode="json"), 32, "d" * 64) == [
        "max_steps was 300, now it is 600",
        "decay_steps was 0, now it is 300",
    ]


def test_a_horizon_that_is_kept_gives_the_same_rates_and_then_the_least():
    short = {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 20, "max_steps": 300, "decay_steps": 0}
    long = {**short, "max_steps": 600, "decay_steps": 300}
    for step in range(600):
        assert learning_rate(step, **schedule_of(long)) == learning_rate(step, **schedule_of(short))
    assert learning_rate(599, **schedule_of(long)) == 1e-4


def test_another_global_batch_is_named_as_another_place_in_the_data(tiny_config):
    (line,) = _changes(tiny_config(), tiny_config(), tokens_per_step=64)
    assert line == "a step had 32 tokens, now it has 64: data continue from another position in their order"


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"n_layer": 3}, r"model\.n_layer: the checkpoint's model has 2, this one 3; use 2"),
        ({"name": "llama-tiny", "n_head": 2, "n_embd": 16}, r"model\.\w+: the checkpoint's model has"),
    ],
)
def test_another_model_is_refused_by_its_field(tiny_config, model, line):
    other = tiny_config(model={"name": "gpt2-demo", "n_layer": 2, "n_embd": 16, "n_head": 2} | model)
    with pytest.raises(UserError, match=line):
        _changes(tiny_config(), other)


def test_a_preset_and_its_values_spelled_out_are_one_model(tiny_config):
    preset, short = PRESETS["gpt2-demo"].config, tiny_config(model="gpt2-demo")
    spelled_out = {"n_layer": preset.n_layer, "n_head": preset.n_head, "n_embd": preset.n_embd}
    for table in (spelled_out, {"activation_checkpointing": "full"}):
        assert _changes(short, tiny_config(model={"name": "gpt2-demo", **table})) == []


def test_other_data_are_refused(tiny_config):
    changed = tiny_config(data={"source": "synthetic", "max_tokens": 7000})
    with pytest.raises(UserError, match=r"data\.max_tokens: the prepared tokens are not those .* were dddddddd"):
        _changes(tiny_config(), changed, data="e" * 64)


def _damage(path):
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_auto_takes_the_newest_good_one_and_says_what_it_passed_over(tiny_config, capsys):
    config = tiny_config(checkpoint_interval=2)
    run_training(config)
    folder = Path(config.out) / "checkpoints"
    _damage(folder / "step-00000006")
    (folder / ".step-00000008.tmp").mkdir()
    capsys.readouterr()
    again = config.model_copy(update={"resume": "auto", "lr": 2e-3})
    assert run_threads(lambda comm: built(again, comm).first_step, 2) == [4, 4]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"resume: passed over {folder / 'step-00000008'}: it was never completed (no manifest.json)"
    assert lines[1].startswith(f"resume: passed over {folder / 'step-00000006'}: ")
    assert "rank-00000-of-00001.safetensors is damaged" in lines[1]
    assert lines[2] == f"resume: step 4 from {folder / 'step-00000004'} (zero2 on 1 rank)"
    assert lines[3] == "resume: lr was 0.001, now it is 0.002"
    assert lines[4] == "resume: the learning rate of step 5 would have been 0.00055, now it is 0.00105"
    assert "a step had 32 tokens, now it has 64" in lines[5]
    assert lines[6].endswith(f"later checkpoints in {folder} were set aside: step-00000006.aside")
    assert len(lines) == 7


def test_auto_starts_afresh_where_nothing_was_ever_completed_and_refuses_where_all_is_damaged(tiny_config):
    config = tiny_config(max_steps=2, resume="auto")
    folder = Path(config.out) / "checkpoints"
    (folder / ".step-00000001.tmp").mkdir(parents=True)
    run_training(config)
    _damage(folder / "step-00000002")
    with pytest.raises(UserError, match=r"^resume: every checkpoint in .* is damaged, the newest because .*; restore"):
        built(config)


@pytest.mark.redundant
def test_the_manifest_has_configuration_versions_and_position(tiny_config):
    config = tiny_config(max_steps=3)
    train_on(LocalCommunicator(), config)
    manifest = checkpoint.read_manifest(Path(config.out) / "checkpoints" / "step-00000003")
    assert manifest.extra["config"] == {**config.model_dump(mode="json"), "compile": "off"}  # as auto found it
    assert manifest.extra["position"] == {"step": 3, "tokens": 96, "tokens_per_step": 32, "seed": 0}
    assert manifest.versions["torch"] == torch.__version__
    assert [group["weight_decay"] for group in manifest.param_groups] == [0.1, 0.0]
    names = {entry.name for entry in manifest.tensors if entry.kind == "param"}
    assert {name for group in manifest.param_groups for name in group["params"]} == names


@pytest.mark.redundant
def test_tokens_are_counted_on_where_a_step_has_another_number_of_them(tiny_config):
    config = tiny_config(max_steps=4, eval_interval=0)
    assert run_training(config) == 0
    assert run_training(tiny_config(max_steps=6, eval_interval=0, micro_batch_size=1, resume="auto")) == 0
    tokens = 4 * 2 * 16 + 2 * 1 * 16
    folder = Path(config.out)
    assert summary_of(folder)["tokens"] == tokens
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    assert checkpoint.read_manifest(newest).extra["position"]["tokens"] == tokens


@pytest.mark.redundant
def test_a_finished_run_that_is_resumed_keeps_its_result(tiny_config, capfd):
    config = tiny_config()
    assert run_training(config) == 0
    summary = (Path(config.out) / "summary.json").read_text()
    assert run_training(tiny_config(resume="auto")) == 0
    assert (Path(config.out) / "summary.json").read_text() == summary
    assert "resume: step 6 of 6 is done, and nothing is left to do; give a larger --max-steps" in capfd.readouterr().err


@pytest.mark.redundant
def test_a_run_that_goes_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(tiny_config, capfd):
    config = tiny_config(max_steps=8, checkpoint_interval=2, keep_checkpoints=0)
    assert run_training(config) == 0
    folder = Path(config.out) / "checkpoints"
    back = {"max_steps": 5, "keep_checkpoints": 1, "resume": str(folder / "step-00000004"), "lr": 5e-4}
    assert run_training(tiny_config(**back)) == 0
    assert checkpoint.latest(folder) == folder / "step-00000005"
    aside = ["step-00000006.aside", "step-00000008.aside"]
    assert sorted(path.name for path in folder.iterdir()) == ["run-id", "step-00000005", *aside]
    assert f"were set aside: {', '.join(aside)}" in capfd.readouterr().err
    seen = read_run(Path(config.out))
    assert [step.step for step in seen.steps] == [1, 2, 3, 4, 5]
    assert seen.steps[-1].lr < 5.1e-4


def test_tied_embeddings_that_were_asked_for_are_no_other_model(tiny_config):
    small = {"name": "llama-tiny", "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16}
    for word in ("yes", "no"):
        config = tiny_config(model={**small, "tie_embeddings": word})
        assert _changes(config, config) == []
    with pytest.raises(UserError, match=r"model\.tie_embeddings: the checkpoint's model has True, this one False"):
        _changes(tiny_config(model={**small, "tie_embeddings": "yes"}), config)


FORGED = {
    "config": 5,
    "config.model": "gpt2",
    "config.strategy": 3,
    "position": [],
    "position.tokens": -1,
    "position.tokens_per_step": "x",
    "data_sha256": 7,
    "guard": {"num_skipped": 0},
    "guard.num_skipped": 5,
    "guards": None,
    "position.step": "x",
    "position.stream": 3,
    "config.lr": "x",
    "config.optim": 5,
    "config.eval_batches": None,
    "config.model.n_layer": -1,
    "best": {"step": 3, "loss": None},
    "loss_scaler": {"scale": 0.0, "num_since_overflow": 0, "num_skipped": 0},
}


@pytest.mark.parametrize("name", FORGED)
def test_what_a_checkpoint_says_of_its_run_is_checked_before_it_is_used(tmp_path, monkeypatch, name):
    good = {"num_skipped": 0, "not_finite_in_a_row": 0}
    extra = {"config": {"model": {"name": "gpt2-demo"}}, "position": {"tokens": 3}, "guard": good}
    *way, last = name.split(".")
    inner = extra
    for key in way:
        inner = inner[key]
    for forged in ("nothing", FORGED[name]):
        if forged != "nothing":
            inner[last] = forged
        facts = SimpleNamespace(extra=extra, step=4)
        monkeypatch.setattr(saved_run.checkpoint, "read_manifest", lambda path, facts=facts: facts)
        if forged == "nothing":
            assert saved_run.saved_run(tmp_path) == extra
        else:
            with pytest.raises(UserError, match=rf"^resume: .* says extra\.{name}.* is .*; take a checkpoint"):
                saved_run.saved_run(tmp_path)
