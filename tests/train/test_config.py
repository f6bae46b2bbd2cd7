"""The configuration: what is refused and in which words, what wins over what, and that it survives a file."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.host.errors import UserError
from zeroshard.settings.validate import by_dotted_name, fields_by_name, validate
from zeroshard.train.config.command_settings import GenerateConfig
from zeroshard.train.config.config import TrainConfig, merge
from zeroshard.train.config.model_section import ModelConfig
from zeroshard.train.config.toml import dump_toml, load_config, read_given, read_toml


def refusal(raw: dict) -> UserError:
    with pytest.raises(UserError) as caught:
        validate(TrainConfig, raw)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_kernels_to_choose_from_are_those_of_the_dispatcher():
    from zeroshard.kernels import CHOICES

    assert get_args(TrainConfig.model_fields["kernels"].annotation) == CHOICES


def test_defaults_are_a_valid_run_with_a_folder_of_its_own():
    assert validate(TrainConfig, {}).out == "runs/gpt2-demo-python-stdlib-zero2"
    assert not validate(TrainConfig, {"strategy": "fsdp2", "reshard_after_forward": False}).reshard_after_forward
    assert not validate(TrainConfig, {"strategy": "zero3", "overlap": False}).overlap


@pytest.mark.parametrize(
    ("raw", "field", "what"),
    [
        ({"lr": -1.0}, "lr", "-1.0 is not above 0"),
        ({"out": 3}, "out", "3 is not text"),
        ({"data": {"path": "a.txt"}}, "data.path", "'a.txt' is not a list"),
        ({"data": 3}, "data", "3 is not a table"),
        ({"model": {"dropout": 1.5}}, "model.dropout", "1.5 is not below 1"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_its_dotted_name(raw, field, what):
    error = refusal(raw)
    assert (error.field, error.what) == (field, what)
    assert error.todo


@pytest.mark.parametrize(
    ("raw", "near"),
    [
        ({"seq_length": 9}, "seq_len"),
        ({"data": {"max_token": 9}}, "data.max_tokens"),
        ({"max_tokens": 9}, "data.max_tokens"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_known_one_is_named(raw, near):
    assert f"did you mean {near}?" in refusal(raw).todo


def test_a_name_stands_for_the_model_and_for_the_data():
    config = validate(TrainConfig, {"model": "llama-tiny", "data": "text"})
    assert (config.model.name, config.data.source) == ("llama-tiny", "text")


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('lr = 0.5\nmax_steps = 7\nmodel = "llama-tiny"\n[data]\nsource = "text"\nmax_tokens = 3\n')
    flags = {"max_steps": "30", "model": {"n_layer": "2"}, "data": {"max_tokens": "4"}}
    config = validate(TrainConfig, merge(read_toml(file), flags))
    assert (config.lr, config.max_steps, config.seed) == (0.5, 30, TrainConfig().seed)
    assert (config.model.name, config.model.n_layer) == ("llama-tiny", 2)
    assert (config.data.source, config.data.max_tokens) == ("text", 4)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*none\.toml"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_config(tmp_path / "binary.toml")
    with pytest.raises(UserError, match="cannot read"):
        load_config(tmp_path)


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@pytest.mark.redundant
@given(
    name=text,
    paths=st.lists(text, max_size=3),
    lr=st.floats(1e-300, 1e300),
    seed=st.integers(0, 2**63 - 1),
    switch=st.booleans(),
)
def test_a_configuration_written_as_toml_reads_back_equal(tmp_path_factory, name, paths, lr, seed, switch):
    raw = {"model": {"name": name}, "data": {"path": paths}, "lr": lr, "min_lr": 0.0, "seed": seed, "compile": switch}
    config = validate(TrainConfig, raw)
    file = tmp_path_factory.mktemp("toml") / "config.toml"
    file.write_text(dump_toml(config), encoding="utf-8", newline="")
    assert load_config(file) == config


def _from_file_of(config, file, **flags):
    file.write_text(dump_toml(config), encoding="utf-8")
    return validate(TrainConfig, merge(read_given(str(file)), flags))


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("given", "flags", "setting", "value"),
    [
        ({"max_steps": 30}, {"max_steps": 10}, "warmup_steps", 1),
        ({"max_steps": 8}, {"max_steps": 500}, "warmup_steps", 20),
        ({}, {"lr": 5e-5}, "min_lr", 5e-6),
        ({}, {"init_from": "runs/other"}, "lr", 2e-5),
        ({"warmup_steps": 3}, {"max_steps": 10}, "warmup_steps", 3),
        ({"model": {"name": "llama-tiny", "n_layer": 2}}, {"model": {"n_layer": 3}}, "model.name", "llama-tiny"),
    ],
)
def test_a_run_started_from_the_file_of_another_derives_what_was_not_given(tmp_path, given, flags, setting, value):
    config = validate(TrainConfig, given)
    again = _from_file_of(config, tmp_path / "config.toml", **flags)
    assert by_dotted_name(again.model_dump())[setting] == value
    assert again.model_fields_set == {*given, *flags}
    assert load_config(tmp_path / "config.toml") == config  # which says what they were in that run


def test_what_was_given_stays_a_choice_even_if_it_is_the_default(tmp_path):
    with pytest.raises(UserError, match="warmup_steps: 20 is above max_steps = 10"):
        _from_file_of(TrainConfig(warmup_steps=20), tmp_path / "config.toml", max_steps=10)


def test_what_auto_became_on_one_machine_is_no_choice_for_another(tmp_path):
    file = tmp_path / "config.toml"
    on_a_gpu = TrainConfig(dtype="auto").resolved(dtype="bfloat16")
    assert _from_file_of(on_a_gpu, file).dtype == "auto"
    assert load_config(file).dtype == "bfloat16"


def test_what_was_changed_by_hand_in_either_part_of_the_file_holds(tmp_path):
    file = tmp_path / "config.toml"
    text = dump_toml(TrainConfig(max_steps=30, model=ModelConfig(name="llama-tiny")))
    edited = text.replace("weight_decay = 0.1", "weight_decay = 0.2").replace("max_steps = 30", "lr = 0.5\nseed = 4")
    file.write_text(edited.replace("n_layer = 0", "n_layer = 3"))
    again = validate(TrainConfig, read_given(str(file)))
    assert (again.max_steps, again.min_lr) == (500, 0.05)
    for config in (load_config(file), again):
        assert (config.weight_decay, config.lr, config.seed) == (0.2, 0.5, 4)
        assert (config.model.name, config.model.n_layer) == ("llama-tiny", 3)
    file.write_text(f"[resolved]\nno_such = 3\n{text.partition('[resolved]')[2]}")
    with pytest.raises(UserError, match="no_such: there is no such key"):
        validate(TrainConfig, read_given(str(file)))


def test_every_field_says_what_it_is():
    fields = fields_by_name(TrainConfig) | fields_by_name(GenerateConfig)
    assert [name for name, field in fields.items() if not field.description] == []


def test_a_rank_alone_joins_the_table_of_adapters():
    assert merge({"lora": 16}, {"lora": {"alpha": 8}}) == {"lora": {"rank": 16, "alpha": 8}}
    assert validate(TrainConfig, {"lora": 16}).lora.rank == 16


@pytest.mark.parametrize(
    ("said", "flag"), [({"track": ["wandb"]}, "track"), ({"optim": "muon"}, "optim"), ({"data": 5}, "data")]
)
def test_a_flag_does_not_hide_a_table_of_the_wrong_kind(said, flag):
    merged = merge(said, {flag: {"name": "x"}})
    assert merged == said
    with pytest.raises(UserError, match=f"^{flag}: "):
        validate(TrainConfig, merged)


def test_a_warm_up_that_nobody_set_is_shortened_with_the_run_and_one_that_was_set_is_refused():
    assert validate(TrainConfig, {"max_steps": 12}).warmup_steps == 1
    assert validate(TrainConfig, {"max_steps": 20}).warmup_steps == 20
    assert validate(TrainConfig, {"max_steps": 12, "warmup_steps": 3}).warmup_steps == 3


def test_rates_that_nobody_gave_follow_from_what_is_trained():
    def rates(**given):
        config = TrainConfig.model_validate(given)
        return [config.lr, config.min_lr]

    assert rates() == [1e-3, 1e-4]
    assert rates(lr=5e-5) == [5e-5, 5e-6]
    assert rates(lr=5e-5, min_lr=0) == [5e-5, 0]
    tuned = {"name": "hf:somewhere"}
    assert rates(model=tuned) == [2e-5, pytest.approx(2e-6)]  # 1e-3 would undo what it has learned
    assert rates(init_from="runs/one") == [2e-5, pytest.approx(2e-6)]
    assert rates(model=tuned, lr=1e-4) == [1e-4, 1e-5]
    assert rates(model={**tuned, "from_config": True}) == [1e-3, 1e-4]
