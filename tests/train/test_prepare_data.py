import io

import pytest
from rich.console import Console

import small_tables as made
from zeroshard.data.bulk import Told
from zeroshard.errors import UserError
from zeroshard.train.config.command_settings import PrepareConfig
from zeroshard.train.config.data_section import DataConfig
from zeroshard.train.config.validate import validate
from zeroshard.train.setup.prepare_data import Teller, data_folder, facts_of, run_prepare


def test_what_was_prepared_is_said(tmp_path, capsys):
    made.write_table(tmp_path / "a.jsonl", made.documents(200))
    data = DataConfig(source="text", path=(str(tmp_path / "a.jsonl"),), dir=str(tmp_path / "out"), workers=1)
    assert run_prepare(data) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"tokens in {tmp_path / 'out'}: ")
    assert out.endswith(" val\n")


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal():
    stream = io.StringIO()
    with Teller(Console(file=stream, force_terminal=False, width=200), line_s=0.0) as teller:
        teller(Told(1_000_000, 0.25, 1000.0))
    assert stream.getvalue() == "25.0%  1,000,000 tokens  1,000 tok/s  left 0:50:00\n"
    with Teller(Console(file=stream, force_terminal=False), line_s=60.0) as teller:
        teller(Told(1, 0.5, 1.0))
    assert stream.getvalue().count("\n") == 1


def test_progress_is_a_bar_on_a_terminal():
    stream = io.StringIO()
    with Teller(Console(file=stream, force_terminal=True, width=120)) as teller:
        teller(Told(1_000_000, 0.25, 1000.0))
    assert "25.0%  1,000,000 tokens" in stream.getvalue()


def test_a_rate_that_is_not_known_leaves_no_time():
    assert facts_of(Told(0, 0.0, 0.0)) == "0.0%  0 tokens  0 tok/s  left 0:00:00"


@pytest.mark.parametrize(
    ("text", "count"), [("1B", 10**9), ("2.5M", 2_500_000), ("10k", 10_000), ("10K", 10_000), ("7", 7), (7, 7)]
)
def test_counts_may_be_short(text, count):
    assert validate(PrepareConfig, {"data": {"max_tokens": text}}).data.max_tokens == count


@pytest.mark.parametrize("text", ["1Q", "B", "-1B", "1.5"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(UserError, match=r"data\.max_tokens: "):
        validate(PrepareConfig, {"data": {"max_tokens": text}})


def test_different_choices_have_different_folders():
    folders = {
        data_folder(DataConfig(source="fineweb-edu")),
        data_folder(DataConfig(source="fineweb-edu", max_tokens=5)),
        data_folder(DataConfig(source="HuggingFaceFW/fineweb-edu:sample-10BT")),
        data_folder(DataConfig(source="fineweb-edu", tokenizer="gpt2")),
        data_folder(DataConfig(source="fineweb-edu", column="url")),
    }
    assert len(folders) == 5
    assert all(len(folder.parts) == 2 for folder in folders)
