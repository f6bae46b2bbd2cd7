"""``zeroshard generate RUN --message TEXT``: a message as the model's template puts it, and its answer alone."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import chats
from hf_models import make_model, require_transformers
from zeroshard.cli import main
from zeroshard.data.tokenizer import ByteTokenizer, read_tokenizer
from zeroshard.train.config.command_settings import GenerateConfig
from zeroshard.train.inference import generate
from zeroshard.train.inference.generate import chat_of, until
from zeroshard.train.start import run_training

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A folder of a model with a tokenizer of ChatML's marks and their template."""
    make_model("llama", vocab_size=270).save_pretrained(tmp_path / "model")
    chats.write_tokenizer(tmp_path / "model", CHATML)
    return tmp_path / "model"


@pytest.fixture
def answers(monkeypatch):
    """`answers(text)`: what any model writes from now on."""

    def say(text):
        def tokens(model, ids, num_tokens, **options):
            inner = answers.tokenizer
            yield from inner.encode_piece(text).tolist() if isinstance(inner, ByteTokenizer) else _ids(inner, text)

        monkeypatch.setattr(generate, "sample", tokens)

    def _ids(tokenizer, text):
        return tokenizer._inner.encode(text, add_special_tokens=False).ids

    answers.tokenizer = ByteTokenizer()
    say.tokenizer = lambda tokenizer: setattr(answers, "tokenizer", tokenizer)
    return say


@pytest.mark.redundant
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_message_has_the_ids_of_apply_chat_template(model, system):
    tokenizer = require_transformers().AutoTokenizer.from_pretrained(model)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "2 + 2? <b>"})
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    config = GenerateConfig(run=f"hf:{model}", message="2 + 2? <b>", system=system)
    found = chat_of(config, read_tokenizer(model / "tokenizer.json"))
    assert found.ids.tolist() == list(expected)
    assert found.end == "<|im_end|>"


def test_the_answer_ends_with_its_turn(model, capsys, answers):
    answers.tokenizer(read_tokenizer(model / "tokenizer.json"))
    answers("It is 4.<|im_end|>\n<|im_start|>user")
    assert main(["generate", f"hf:{model}", "--message", "2 + 2?"]) == 0
    assert capsys.readouterr().out == "It is 4.\n"
    assert main(["generate", f"hf:{model}", "--message", "2 + 2?", "--no-stop"]) == 0
    assert capsys.readouterr().out == "It is 4.<|im_end|>\n<|im_start|>user\n"


@pytest.mark.redundant
@pytest.mark.parametrize(("words", "said"), [([], "4\n"), (["--no-stop"], "4<|endoftext|>!\n")])
def test_an_answer_that_another_token_ends_has_no_token_of_it(model, capsys, monkeypatch, words, said):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    tokenizer = read_tokenizer(model / "tokenizer.json")
    ids = [tokenizer.id_of(text) for text in ("4", "<|endoftext|>", "!")]
    monkeypatch.setattr(generate, "sample", lambda *_, **options: iter(ids))
    assert main(["generate", f"hf:{model}", "--message", "2 + 2?", *words]) == 0
    assert capsys.readouterr().out == said


def test_a_run_of_conversations_answers_by_the_template_that_it_was_trained_with(
    tiny_config, tmp_path, capsys, answers
):
    rows = chats.write_rows(tmp_path / "chat.jsonl", chats.conversations(40))
    data = {"source": "text", "path": (str(rows),), "dir": str(tmp_path / "tokens"), "format": "chat"}
    run_training(tiny_config(data={**data, "template": "chatml"}, seq_len=96, max_steps=2, warmup_steps=0))
    run = str(tmp_path / "run")
    text = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert bytes(chat_of(GenerateConfig(run=run, message="1 + 1?"), ByteTokenizer()).ids.tolist()).decode() == text
    answers("2<|im_end|>\n")  # of bytes: the mark is ten tokens
    capsys.readouterr()
    assert main(["generate", run, "--message", "1 + 1?"]) == 0
    assert capsys.readouterr().out == "2\n"


@pytest.mark.redundant
def test_a_run_of_plain_text_answers_by_the_template_of_the_model_that_it_was_started_from(model, tmp_path):
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    shutil.copy(model / "tokenizer.json", run / "tokenizer" / "tokenizer.json")
    shutil.copytree(model, run / "hugging-face")
    tokenizer = read_tokenizer(model / "tokenizer.json")
    found = [chat_of(GenerateConfig(run=each, message="a"), tokenizer) for each in (str(run), f"hf:{model}")]
    assert torch.equal(found[0].ids, found[1].ids)


def test_the_end_is_found_wherever_pieces_part_it():
    text, end = "a <|im <|im_end|> b", "<|im_end|>"
    for first in range(len(text)):
        for second in range(first, len(text)):
            pieces = [text[:first], text[first:second], text[second:]]
            assert "".join(until(pieces, end)) == "a <|im "
            assert "".join(until(pieces, "never")) == "".join(until(pieces, "")) == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--message", "a", "--prompt", "b"), "message: is given beside a prompt; give one of the two"),
        (("--message", ""), "message: is empty; say something"),
        (("--system", "a"), "system: is given without a message; add --message TEXT"),
        (("--template", "chatml"), "template: is given without a message"),
        (("--message", "a", "--template", "no-such-file"), "template: no-such-file cannot be read"),
        (
            ("--message", "a", "--template", "REFUSES"),
            "template: {REFUSES} refuses the conversation in --message: 'no'",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(model, capsys, tmp_path, words, said):
    path = tmp_path / "refuses.jinja"
    path.write_text("{{ raise_exception('no') }}")
    words = [str(path) if word == "REFUSES" else word for word in words]
    assert main(["generate", f"hf:{model}", *words]) == 2
    found = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+: [^\n]+; [^\n]+\n", found), found
    assert said.replace("{REFUSES}", str(path)) in found


def test_a_model_without_a_template_asks_for_one(model, capsys):
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    for path in Path(model).glob("chat_template*"):
        path.unlink()
    assert main(["generate", f"hf:{model}", "--message", "a"]) == 2
    said = capsys.readouterr().err
    assert "has no chat template; give one by --template FILE, or --template chatml" in said
    torch.manual_seed(0)
    assert main(["generate", f"hf:{model}", "--message", "a", "--template", "chatml", "--max-new-tokens", "2"]) == 0
