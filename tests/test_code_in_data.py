"""Data decide nothing about which code runs: for every verb, whatever a run folder, a checkpoint or a file names.

`trap` is a module of the current folder, `own.py` a Python file of a Hugging Face folder: each leaves a file when it is
imported. The code runs if a flag of the command asks for it.
"""

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from forged_manifests import CHECKPOINT, DATA, OURS, TRAIN, make_run, read_facts, write_facts
from hf_models import make_model, require_transformers
from zeroshard.cli import main
from zeroshard.data.tokenizer import train_bpe
from zeroshard.host.errors import UserError
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.named_code import code_in, flags_for_code, require_trust

SOAK = pytest.mark.soak
TRAP = """
from pathlib import Path
Path("sprung").write_text("")
from zeroshard.models.gpt2 import GPT2Config
def config(**sizes):
    return GPT2Config(**{"vocab_size": 256, "seq_len": 16, "n_layer": 1, "n_head": 2, "n_embd": 8, **sizes})
"""
OWN = """
from pathlib import Path
Path({sprung!r}).write_text("")
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "unheard-of"
class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`run`: of a GPT-2, one step; `tokens`: its data."""
    return make_run(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy, in the current folder, beside the module `trap`."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "trap.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name == "trap" or "transformers_modules" in name]:
        del sys.modules[name]


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A Hugging Face folder whose model needs a Python file of its own."""
    require_transformers()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "theirs"
    make_model("llama", vocab_size=300).save_pretrained(model)
    (model / "own.py").write_text(OWN.format(sprung=str(tmp_path / "sprung")))
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "unheard-of", "architectures": ["Model"]}
    settings["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (model / "config.json").write_text(json.dumps(settings))
    (model / "tokenizer.json").write_text(train_bpe(258, ["to be or not to be " * 20]).to_json())
    return model


def forge(config, *, manifest=True, toml=True, run=Path("run")):
    """Put ``config`` over the settings in the run's ``config.toml`` and its checkpoint's manifest, checksum and all."""

    def over(settings):
        for name, value in config.items():
            *tables, leaf = name.split(".")
            inner = settings
            for table in tables:
                inner = inner.setdefault(table, {})
            inner[leaf] = value

    if toml:
        settings = tomllib.loads((run / "config.toml").read_text())
        over(settings)
        (run / "config.toml").write_text(tomli_w.dumps(settings))
    if manifest:
        facts = read_facts(run / CHECKPOINT)
        over(facts["extra"]["config"])
        write_facts(run / CHECKPOINT, facts)


READERS = {
    "generate": "generate run --max-new-tokens 3",
    "eval": "eval run --data-dir tokens --batches 1",
    "export": "export run new",
    "checkpoint show": f"checkpoint show run/{CHECKPOINT}",
    "report": "report run",
    "train its settings": "train --config run/config.toml --out new",
    "resume its settings": "train --config run/config.toml --resume auto",
    "resume": f"train {TRAIN} {OURS} {DATA} --out run --resume auto",
    "init from a run": f"train {TRAIN} {DATA} --out new --init-from run",
    "init a model from a run": f"train {TRAIN} {OURS} {DATA} --out new --init-from run",
    "prepare": "prepare --config run/config.toml",
    "submit": "submit --cluster local train --config run/config.toml",
    "sweep over a run": "sweep --base.init-from run --base.max-steps 1 --axes.strategy zero0 --out new --dry-run",
}
NAMED = {
    "a model": {"model.name": "trap:config", "model.n_layer": 0, "model.n_embd": 0, "model.n_head": 0},
    "a function that ends the process": {"model.name": "os:abort"},
    "a source": {"data.source": "trap:config"},
    "a strategy": {"strategy": "trap:config"},
    "a communicator": {"comm": "trap:config"},
    "a callback": {"callback": ["trap:config"]},
}


def one_line(capsys):
    err = capsys.readouterr().err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines(keepends=True) if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert re.fullmatch(r"error: [^\n]+?: [^\n]+; [^\n]+\n", lines[0]), err
    return lines[0]


# Each reader with one of the names, and two of them with every one.
READ = [(reader, list(NAMED)[number % len(NAMED)]) for number, reader in enumerate(READERS)]
READ += [(reader, named) for reader in ("generate", "resume") for named in NAMED if (reader, named) not in READ]


@pytest.mark.parametrize(("reader", "named"), READ)
def test_a_module_that_a_run_names_is_not_imported(folder, capsys, reader, named):
    forge(NAMED[named])
    status = main(READERS[reader].split())
    assert not (folder / "sprung").exists()
    assert "trap" not in sys.modules
    assert status in (0, 2)
    if status == 2:
        one_line(capsys)
        assert not (folder / "new").exists()


NO_MODEL = ("prepare", "submit", "sweep over a run")
QUICK = ("generate", "checkpoint show", "resume", "init from a run")  # by a way of their own to the model


@pytest.mark.parametrize(
    "reader",
    [pytest.param(name, marks=[] if name in QUICK else SOAK) for name in READERS if name not in NO_MODEL],
)
def test_the_python_files_that_a_run_trusted_are_not_run_again_unasked(folder, own_code, capsys, reader):
    text = (own_code / "config.json").read_text()
    forge({"model": {"name": f"hf:{own_code}", "trust_remote_code": True, "config_json": text, "from_config": True}})
    status = main(READERS[reader].split())
    assert not (folder / "sprung").exists()
    assert status in (0, 2)
    if status == 2:
        one_line(capsys)


@pytest.mark.parametrize(
    "words",
    [
        "plan --model hf:theirs --seq-len 16",
        "generate hf:theirs --max-new-tokens 3",
        "eval hf:theirs --data-dir tokens --batches 1",
        f"train {TRAIN} {DATA} --model hf:theirs --out new",
        f"train {TRAIN} {DATA} --init-from hf:theirs --out new",
        "import theirs new",
        "generate theirs",
        "eval theirs --data-dir tokens",
        "sweep --base.model hf:theirs --axes.strategy zero0 --base.max-steps 1 --dry-run",
    ],
)
def test_the_python_files_of_a_folder_are_not_run_unasked(folder, own_code, capsys, words):
    status = main(words.split())
    assert not (folder / "sprung").exists()
    assert status == 2 or words.startswith("sweep")  # a sweep's dry run opens no model
    if status == 2:
        one_line(capsys)


def test_kernels_of_the_hub_that_a_configuration_names_are_refused(folder, capsys, monkeypatch):
    require_transformers()
    make_model("llama").save_pretrained(folder / "theirs")
    path = folder / "theirs/config.json"
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        settings = json.loads(path.read_text())
        (folder / "theirs/config.json").write_text(json.dumps(settings | {key: "somebody/kernels"}))
        assert main(["plan", "--model", "hf:theirs", "--seq-len", "12"]) == 2
        assert f"'somebody/kernels' as its {key}" in one_line(capsys)
        path.write_text(json.dumps(settings))


# -- what a flag asks for runs ----------------------------------------------------------------------------------------


def test_a_flag_of_the_command_lets_the_named_module_run(folder, capsys):
    mine = f"train {TRAIN} {DATA} --model trap:config"
    assert main(f"{mine} --out mine".split()) == 0
    assert (folder / "sprung").exists()
    assert main(f"{mine} --out mine --resume auto --max-steps 3".split()) == 0
    assert main(f"train --config mine/config.toml {TRAIN} --model trap:config --out again".split()) == 0
    assert main(f"{mine} --out tuned --init-from mine".split()) == 0
    for words in ("generate mine --max-new-tokens 3", "eval mine --batches 1"):
        capsys.readouterr()
        assert main(words.split()) == 2
        assert "; add --model.trust-remote-code to this command where you trust it" in one_line(capsys)
        assert main([*words.split(), "--model.trust-remote-code"]) == 0
    assert main(f"train --config mine/config.toml --out other {TRAIN}".split()) == 2
    assert "; add --model.name 'trap:config' to this command where you trust it" in one_line(capsys)


def test_a_flag_of_the_command_lets_the_models_own_files_run(folder, own_code, capsys):
    trust = ["--model.trust-remote-code"]
    ask = f"train {TRAIN} {DATA} --data.dir theirs-tokens --model hf:theirs".split()
    assert main([*ask, *trust, "--out", "mine"]) == 0
    assert (folder / "sprung").exists()
    assert main([*ask, *trust, "--out", "mine", "--resume", "auto", "--max-steps", "3"]) == 0
    for words in ("generate mine --max-new-tokens 3", "eval mine --batches 1", "export mine new"):
        capsys.readouterr()
        assert main(words.split()) == 2
        one_line(capsys)
        assert main([*words.split(), *trust]) == 0
    shutil.move("theirs", "moved")  # the text that the run has kept decides whether it is the same model
    moved = [word.replace("hf:theirs", "hf:moved") for word in ask]
    assert main([*moved, *trust, "--out", "mine", "--resume", "auto", "--max-steps", "4"]) == 0


def test_a_sweep_passes_on_what_its_flags_name_and_nothing_from_its_file(folder, capsys):
    (folder / "sweep.toml").write_text('[base]\nmodel = "trap:config"\n[axes]\nstrategy = ["zero0"]\n')
    words = ["sweep", "--config", "sweep.toml", "--out", "new", "--dry-run"]
    assert main(words) == 2
    assert "names the code 'trap:config'" in one_line(capsys)
    assert main([*words, "--base.model", "trap:config"]) == 0
    (folder / "sweep.toml").write_text('[axes]\nstrategy = ["zero0", "trap:config"]\n')
    assert main(words) == 2
    assert main([*words, "--axes.strategy", "zero0", "trap:config"]) == 0
    assert not (folder / "sprung").exists()
    config = TrainConfig.model_validate({"model": {"name": "trap:config"}, "strategy": "trap:config"})
    assert flags_for_code(config) == ["--model.name", "trap:config", "--strategy", "trap:config"]


def test_names_that_are_no_code_are_told_from_those_that_are():
    plain = {"model.name": "hf:gpt2", "data.source": "hf:owner", "strategy": "zero2", "comm": "auto", "out": "a:b"}
    assert code_in(plain) == {}
    theirs = {"model": {"name": "a.b:c", "trust_remote_code": True}, "data": {"source": "a:b"}, "comm": "a:b"}
    assert [*code_in(theirs)] == ["model.name", "model.trust_remote_code", "data.source", "comm"]


def test_a_run_that_a_library_call_trains_may_name_code(folder):
    """A caller from Python chooses its code itself."""
    config = TrainConfig.model_validate({"model": {"name": "trap:config"}})
    assert code_in(config) == {"model.name": "trap:config"}
    with pytest.raises(UserError, match=r"mine/config\.toml names the code"):
        require_trust(config.model, "mine/config.toml", trusted=False)
