"""The command line under words that nobody would write: a documented status, one line for a mistake, no traceback."""

import re
from itertools import chain
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soak import examples
from zeroshard.cli import VERBS, main
from zeroshard.cli.flags import flags_of
from zeroshard.host.errors import ExitStatus
from zeroshard.host.launch.ending import Ending
from zeroshard.settings.validate import fields_by_name

HUGE = ("9223372036854775808", "9" * 400, "9" * 5000)
TEXTS = ("", "x", "none", "é", "a" * 5000, "..", "/", "-", "--", "$(x)", "\x1b[31m", "a\nb", "a\0b", "\udcff")
SIZES = ("1GB", "1Gbit/s", "400", "9" * 400 + "GB", "-1GB", "0.5s")
FILES = ("text.txt", "settings.toml", "nothing", "new/out", "text.txt/x", ".")
BY_TYPE = {
    int: ("0", "1", "3", "-1", "1k", "1e3", "2.5", "0x10", "2**3", "١٢", "", *HUGE),
    float: ("0", "0.5", "-1", "1e-320", "1e309", "nan", "-inf", "0,5", "", "x", *HUGE),
    bool: ("true", "no", "2", ""),
}
SMALL = {"plan": ["--model.n-layer", "1", "--gpus", "2", "--micro-batch", "1"]}  # the odd words follow, and win
FIXED = {
    "import-config": ("nanogpt", "deepspeed", "x", "--n_layer=None"),
    "checkpoint": ("ls", "show", "verify", "diff"),
    "report": ("--out", "--to", "wandb"),
    "doctor": ("x", ".."),
    "completion": ("bash", "zsh", "fish"),
}


def _values(annotation: Any) -> tuple[str, ...]:
    """Words for a setting of this type: some that fit, some that nearly fit, and others."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return (*inside, *TEXTS[:4])
    if origin in (Annotated, tuple):
        return _values(inside[0])
    return BY_TYPE.get(annotation, TEXTS + SIZES + FILES)


def _settings(verb: str) -> Any:
    """A list of flags of a verb, with their values."""
    config, choices = VERBS[verb].config, []
    for name, flag in flags_of(config, VERBS[verb].positionals).items():
        if flag.kind == "switch":
            choices.append(st.sampled_from([[name], [f"{name}=2"]]))
            continue
        values = st.sampled_from(sorted(set(_values(fields_by_name(config)[".".join(flag.path)].annotation))))
        choices.append(values.map(lambda value, name=name: [name, value]))
        choices.append(values.map(lambda value, name=name: [f"{name}={value}"]))
    return st.lists(st.one_of(choices), max_size=4).map(lambda found: [*chain(*found)]) if choices else st.just([])


def _words(verb: str) -> Any:
    if VERBS[verb].config is None:
        return st.lists(st.sampled_from((*FIXED[verb], *TEXTS, *FILES)), max_size=4).map(lambda words: [verb, *words])
    files = st.lists(st.sampled_from(FILES), max_size=2)
    after = [VERBS[verb].before] if VERBS[verb].before else []
    begin = [verb, *SMALL.get(verb, [])]
    return st.tuples(files, _settings(verb)).map(lambda found: [*begin, *found[0], *found[1], *after])


@pytest.fixture
def nothing_lasts(monkeypatch, tmp_path):
    """Where a verb would train, start processes or queue a job, it stops; the current folder has two files."""
    monkeypatch.setattr("zeroshard.train.start.run_training", lambda *args: 0)
    monkeypatch.setattr("zeroshard.host.launch.start_ranks.launch_workers", lambda *args, **kwargs: Ending(0))
    monkeypatch.setattr("zeroshard.cli.submit.submit", lambda config, words: "queued")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 100)
    (tmp_path / "settings.toml").write_text('seq_len = 16\n[data]\nsource = "synthetic"\n')


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_lasts")
def test_no_words_end_in_a_traceback(capsys):
    verbs = [name for name in VERBS if VERBS[name].config or name in FIXED]

    @settings(max_examples=examples(100, 2000), suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(verbs).flatmap(_words))
    def holds(words):
        status = main(words)
        err = capsys.readouterr().err
        ran_out = status == ExitStatus.FAILED and err.startswith("error: memory: ")
        assert ran_out or status in (ExitStatus.OK, ExitStatus.USAGE, ExitStatus.CHECK_FAILED, ExitStatus.STORAGE), err
        if status in (ExitStatus.USAGE, ExitStatus.STORAGE):
            (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
            assert re.fullmatch(r"error: [^\n]+?: [^\n]+; [^\n]+", line), line
            assert len(line) < 2000

    holds()
