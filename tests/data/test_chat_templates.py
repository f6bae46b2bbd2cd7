"""Templates render as `transformers` renders them, in a sandbox, and say what the assistant writes."""

import json
from contextlib import nullcontext

import pytest

import chats
from zeroshard.data import chat_templates, template_worker
from zeroshard.data.chat_templates import ChatTemplate, find_template
from zeroshard.host.errors import UserError

CHATML = find_template("chatml", "bytes").text
# In the manner of LLaMA 2: marks in brackets, the system's message in the first turn.
BRACKETS = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}\n"
    "{% for message in rest %}\n"
    "    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns do not alternate') }}"
    "{% endif %}\n"
    "    {% if message['role'] == 'user' %}\n"
    "        {{- bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}\n"
    "    {% else %}\n"
    "        {{- ' ' + message['content'] + eos_token }}\n"
    "    {% endif %}\n"
    "{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m | tojson }}{% endif %}{% if loop.last %}end{% break %}{% endif %}{% endfor %}"
)


@pytest.mark.redundant
@pytest.mark.parametrize("text", [CHATML, BRACKETS, MARKED], ids=["chatml", "brackets", "marked"])
def test_a_conversation_is_rendered_as_transformers_renders_it(text, tmp_path):
    transformers = pytest.importorskip("transformers")
    chats.write_tokenizer(tmp_path, text, bos_token="<s>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = find_template("", f"json:{tmp_path}/tokenizer.json")
    with ours.opened() as opened:
        for row in chats.conversations(7):
            for generate in (False, True):
                options = {"tokenize": False, "add_generation_prompt": generate}
                found = opened.render(row["messages"], "", add_generation_prompt=generate)
                assert found == theirs.apply_chat_template(row["messages"], **options)


def answers(template, messages):
    with template.opened() as opened:
        ((text, spans),) = opened.render_with_spans([("row 1", messages)])
    assert "\ue000" not in text
    return [text[begin:end] for begin, end in spans]


TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "Ciao"},
]


@pytest.mark.redundant
def test_what_the_assistant_writes_ends_as_the_template_ends_a_turn():
    assert answers(ChatTemplate(CHATML, "t"), TURNS) == ["Hello<|im_end|>\n", "Ciao<|im_end|>\n"]
    assert answers(ChatTemplate(CHATML, "t"), TURNS[:3]) == ["Hello<|im_end|>\n"]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    assert answers(ChatTemplate(BRACKETS, "t", special), TURNS) == [" Hello</s>\n", " Ciao</s>\n"]


def test_marks_of_the_template_say_what_the_assistant_writes():
    assert answers(ChatTemplate(MARKED, "t"), TURNS) == ["Hello<|im_end|>", "Ciao<|im_end|>"]


@pytest.mark.redundant(
    but=["{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}-differently if others follow"]
)
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{% for x in %}", "is no template: line 1"),
        ("{% for x in [1] %}" * 30 + "{% endfor %}" * 30, "is no template: too many statically nested blocks"),
        ("{{ raise_exception('no turns of the system') }}", "no turns of the system"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ strftime_now('%d') }}", "strftime_now"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "differently if others follow"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_a_line(text, line):
    with (
        pytest.raises(UserError, match=r"data\.template") as refused,
        ChatTemplate(text, "mine.jinja").opened() as opened,
    ):
        list(opened.render_with_spans([("row 1", TURNS)]))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (LOOPS, "takes more than 1 s of computing for row 1; correct it, or give another"),
        ("{{ 7 ** 70000000 }}", "takes more than 1 s of computing; correct it"),  # computed when it is compiled
        ("{{ 'a' * 2000000000 }}", "takes more than 1,024 MiB of memory for row 1; correct it"),
        ("{{ messages[0].content * 1000000000 }}", "takes more than 1,024 MiB of memory for row 1"),
        ("{{ messages | tojson(indent=300000000) }}", "takes more than 1,024 MiB of memory for row 1"),
        ("{{ messages[0].content.ljust(99000000) }}", "writes 99,000,000 characters, more than 67,108,864 for row 1"),
    ],
    ids=["loops", "compiling", "constants", "text", "indent", "long"],
)
def test_a_template_without_end_is_refused_in_a_line(text, line, monkeypatch):
    if "1 s of computing" in line:  # the others take time too, for pages of memory
        monkeypatch.setattr(chat_templates, "SECONDS", 1)
    with (
        pytest.raises(UserError, match=r"^data\.template: mine\.jinja") as refused,
        ChatTemplate(text, "mine.jinja").opened() as opened,
    ):
        opened.render(TURNS, "row 1")
    assert line in str(refused.value)


def test_a_template_goes_on_after_a_row_that_it_refuses():
    with ChatTemplate("{{ messages[0].content * messages[1].content }}", "t").opened() as opened:
        for times in (2_000_000_000, 40_000_000, "no number"):
            with pytest.raises(UserError, match=r"of memory for row 1|80,000,000 characters|refuses the conversation"):
                opened.render([{"content": "ab"}, {"content": times}], "row 1")
        assert opened.render([{"content": "ab"}, {"content": 3}], "row 2") == "ababab"


def test_of_many_conversations_the_one_is_named_that_is_refused():
    rows = [(f"row {i}", [*TURNS[:1], {"role": "assistant", "content": "long " * 500}]) for i in range(300)]
    rows[200][1][0] = {"role": "user", "content": 0}
    with ChatTemplate("{{ 1 // messages[0].content | length }}" + CHATML, "t").opened() as opened:
        for last, line in ((150, None), (300, "the conversation in row 200:"), (150, None)):
            texts = []
            with pytest.raises(UserError, match=line) if line else nullcontext():
                texts.extend(text for text, _ in opened.render_with_spans(rows[:last]))
            assert texts == [opened.render(messages, where) for where, messages in rows[: min(last, 200)]][: len(texts)]
            assert 90 < len(texts) <= 200


def test_a_template_lies_beside_its_tokenizer(tmp_path):
    path = chats.write_tokenizer(tmp_path, "from the configuration")
    name = f"json:{path}"
    assert find_template("", name).text == "from the configuration"
    assert find_template("", name).special_tokens == {"eos_token": "<|im_end|>"}
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "the default"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find_template("", name).text == "the default"
    (tmp_path / "chat_template.jinja").write_text("a file of its own")
    assert find_template("", name).text == "a file of its own"
    assert find_template("chatml", name).text == CHATML


def test_a_tokenizer_without_a_template_asks_for_one(tmp_path):
    path = chats.write_tokenizer(tmp_path)
    for name in (f"json:{path}", "bytes"):
        with pytest.raises(UserError, match=r"has no chat template; give one by --data.template FILE"):
            find_template("", name)


@pytest.mark.parametrize("left", [b"", b'["done", "cut'], ids=["nothing", "half an answer"])
def test_a_worker_that_ends_is_told_in_one_line_whatever_it_leaves(left, tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(f"import sys; sys.stdout.buffer.write({left!r}); sys.stdout.flush(); sys.exit(7)")
    monkeypatch.setattr(template_worker, "__file__", str(worker))
    refused = pytest.raises(UserError, match=r"data.template: .* ended with status 7; correct it, or ")
    with refused, find_template("chatml", "bytes").opened():
        pass
