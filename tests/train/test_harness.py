import json
import math

import pytest
import torch

from zeroshard.data.tokenizer import ByteTokenizer
from zeroshard.errors import UserError
from zeroshard.inference.generate import sample
from zeroshard.inference.harness import harness_model, loglikelihoods, run_tasks
from zeroshard.models import build_model
from zeroshard.train.config.command_settings import EvalConfig
from zeroshard.train.loop.loop import run_training


@pytest.fixture
def model():
    return build_model("gpt2-demo", overrides={"n_layer": 2, "n_embd": 16, "n_head": 2, "seq_len": 12}).eval()


def alone(model, context, continuation):
    """One continuation, without padding or batch."""
    ids = (context + continuation)[-13:]
    with torch.no_grad():
        chances = torch.log_softmax(model(torch.tensor([ids[:-1]]))[0], -1)
    wanted = ids[len(ids) - len(continuation) :]
    tail = chances[-len(continuation) :]
    return sum(tail[i, id_].item() for i, id_ in enumerate(wanted)), tail.argmax(-1).tolist() == wanted


PAIRS = [([1, 2, 3], [4]), ([5], [6, 7, 8]), (list(range(20)), [9, 10]), ([3], [3] * 5), ([0], [1])]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_batch_scores_what_each_scores_alone(model, batch_size):
    for (found, likeliest), pair in zip(loglikelihoods(model, PAIRS, batch_size), PAIRS, strict=True):
        wanted, wanted_likeliest = alone(model, *pair)
        assert found == pytest.approx(wanted, abs=1e-5)
        assert likeliest == wanted_likeliest


def test_what_the_model_would_write_is_the_likeliest(model):
    written = list(sample(model, torch.tensor([7]), 4, temperature=0.0))
    assert loglikelihoods(model, [([7], written)], 1)[0][1]
    assert not loglikelihoods(model, [([7], [(written[0] + 1) % 256])], 1)[0][1]


class _Request:
    def __init__(self, *args):
        self.args = args


@pytest.mark.filterwarnings("default")  # the harness's own
def test_a_whole_text_is_scored_token_by_token_also_when_it_is_long(model):
    pytest.importorskip("lm_eval")
    adapter = harness_model(model, ByteTokenizer())
    short, long = adapter.loglikelihood_rolling([_Request("abc"), _Request("abcd" * 8)])
    assert short == pytest.approx(alone(model, [10], list(b"abc"))[0], abs=1e-5)
    assert math.isfinite(long)
    assert long < short


@pytest.mark.filterwarnings("default")  # the harness's own
def test_text_ends_before_the_words_that_end_it(model):
    pytest.importorskip("lm_eval")
    adapter = harness_model(model, ByteTokenizer())
    settings = {"until": [], "max_gen_toks": 6}
    (text,) = adapter.generate_until([_Request("ab", settings)])
    assert text == ByteTokenizer().decode(list(sample(model, torch.tensor([97, 98]), 6, temperature=0.0)))
    (cut,) = adapter.generate_until([_Request("ab", settings | {"until": [text[2]]})])
    assert cut == text[: text.index(text[2])]


TASK = """\
task: two_choices
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {path}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_choice: [d, x]
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.mark.filterwarnings("default")  # the harness's own
def test_a_task_of_ones_own_runs(text_config, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    config = text_config(max_steps=60, lr=0.02, eval_interval=0)
    run_training(config)
    lines = [json.dumps({"question": "abcd\nabc", "answer": 0})] * 3 + [json.dumps({"question": "abc", "answer": 1})]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "two_choices.yaml").write_text(TASK.format(path=tmp_path / "questions.jsonl"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()
    words = {"run": config.out, "tasks": (str(tmp_path / "two_choices.yaml"),), "json_line": True}
    assert run_tasks(EvalConfig(**words)) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["two_choices"]["acc,none"] == 0.75
    with pytest.raises(UserError, match="the harness has no task 'no_such_task'"):
        run_tasks(EvalConfig(run=config.out, tasks=("no_such_task",)))


def test_without_the_harness_it_is_said(monkeypatch):
    monkeypatch.setattr("zeroshard.inference.harness.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tasks: they need the package lm-eval; pip install 'zeroshard\[lm-eval\]'"):
        run_tasks(EvalConfig(run="runs/x", tasks=("arc_easy",)))
