import pytest

import small_tables as made
from zeroshard.data.prepare import Progress
from zeroshard.data.sources import check_source
from zeroshard.host.errors import UserError
from zeroshard.settings.validate import validate
from zeroshard.train.config.command_settings import PrepareConfig
from zeroshard.train.config.data_section import DataConfig
from zeroshard.train.setup.prepare_data import ProgressLines, data_folder, data_spec, run_prepare


def test_what_was_prepared_is_said(tmp_path, capsys):
    made.write_table(tmp_path / "a.jsonl", made.documents(200))
    data = DataConfig(source="text", path=(str(tmp_path / "a.jsonl"),), dir=str(tmp_path / "out"), workers=1)
    assert run_prepare(data) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"tokens in {tmp_path / 'out'}: ")
    assert out.endswith(" val\n")


def test_progress_is_a_line_now_and_then(capsys):
    for line_s in (0.0, 60.0):
        ProgressLines(line_s)(Progress(1_000_000, 0.25, 1000.0))
    assert capsys.readouterr().err == "25.0%  1,000,000 tokens  1,000 tok/s  left 0:50:00\n"


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


@pytest.mark.parametrize(
    "named", ["mine.txt", "texts", "texts/*.jsonl", "./texts", "texts/a.jsonl", "https://x/a.jsonl"]
)
def test_a_path_may_be_named_in_place_of_a_source(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "mine.txt").write_text("a text\n")
    made.write_table(tmp_path / "texts" / "a.jsonl", ["one", "two"])
    for given in ({"data": named}, {"data": {"source": named}}):
        data = validate(PrepareConfig, given).data
        assert (data.source, data.path) == ("text", (named,))


def test_a_name_that_may_be_a_folder_or_of_the_hub_is_asked_about(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "texts").mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("a text\n")
    (tmp_path / "ids.bin").write_bytes(bytes(4))
    with pytest.raises(UserError, match=r"owner/texts is a folder here.*write \./owner/texts, or hf:owner/texts"):
        validate(PrepareConfig, {"data": "owner/texts"})
    with pytest.raises(UserError, match=r"mine\.txt is a path, and data\.path names others"):
        validate(PrepareConfig, {"data": {"source": "mine.txt", "path": ["other.txt"]}})
    assert validate(PrepareConfig, {"data": "ids.bin"}).data.source == "bin"
    assert validate(PrepareConfig, {"data": "gone.txt"}).data.source == "gone.txt"
    with pytest.raises(UserError, match=r"data\.source: there is no file gone\.txt; give one, or one of"):
        check_source("gone.txt", ())


def test_a_column_reaches_the_sources_that_have_columns_and_no_others(tmp_path):
    rows, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    made.write_table(rows, ["one", "two"], column="body")
    text.write_text("plain\n")
    plain = DataConfig(source="text", path=(str(text),), val_path=(f"set={rows}",), column="body")
    assert data_spec(plain).column == "text"
    for alone in (DataConfig(source="text", path=(str(text),), column="body"), DataConfig(column="body")):
        with pytest.raises(UserError, match=r"data\.column: 'body' is asked for"):
            run_prepare(alone.model_copy(update={"dir": str(tmp_path / "out")}))
