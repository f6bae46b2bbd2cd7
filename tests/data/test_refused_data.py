"""Sources, files and settings of data that cannot be: each refused in a line that names field, fault and remedy."""

import pytest

from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.host.errors import UserError

FINE = '{"text": "fine"}\n'
CHAT = "text a.jsonl format=chat template=chatml val_fraction=0"
PAIRS = "text a.jsonl format=prompt val_fraction=0"


def _says(role, content):
    return f'{{"messages": [{{"role": "{role}", "content": {content}}}]}}'


# What a `DataSpec` is given, the content of the files that it names, and how the line begins that refuses it.
REFUSED = [
    ("python-stdli", None, "data.source: 'python-stdli' is unknown; did you mean 'python-stdlib'? choose one of "
     "python-stdlib, python-docs, text, synthetic, bin, fineweb-edu, openwebtext, OWNER/NAME of"),
    ("text", None, "data.path: the source text needs at least one path; pass --data.path FILE"),
    ("python-stdlib a.txt", None, "data.path: the source python-stdlib reads no files, got a.txt; use --data text"),
    ("synthetic a.txt", None, "data.path: the source synthetic reads no files, got a.txt; use --data text"),
    ("python-docs column=body", None, "data.column: 'body' is asked for, and the source python-docs has no columns; "),
    ("synthetic tokenizer=byte", None, "data.tokenizer: 'byte' is unknown; did you mean 'bytes'? choose one of bytes, "
     "gpt2, r50k_base, p50k_base, cl100k_base, o200k_base, bpe:N, json:PATH"),
    ("synthetic tokenizer=bpe:", None, "data.tokenizer: bpe: does not name a vocabulary size; use bpe:N with N from"),
    ("synthetic tokenizer=bpe:256", None, "data.tokenizer: bpe:256 does not name a vocabulary size; use bpe:N with N"),
    ("synthetic tokenizer=bpe:-300", None, "data.tokenizer: bpe:-300 does not name a vocabulary size; use bpe:N with"),
    ("synthetic tokenizer=bpe:3e3", None, "data.tokenizer: bpe:3e3 does not name a vocabulary size; use bpe:N with N"),
    ("synthetic tokenizer=bpe:٣٠٠", None, "data.tokenizer: bpe:٣٠٠ does not name a vocabulary size; use bpe:N with N"),
    ("synthetic tokenizer=bpe:99999999", None, "data.tokenizer: bpe:99999999 does not name a vocabulary size; use"),
    ("synthetic tokenizer=json:b", None, "data.tokenizer: json:b names no file; use json:PATH of a tokenizer.json"),
    ("synthetic val_fraction=-0.1", None, "data.val_fraction: -0.1 is not in [0, 1); give a share such as 0.1"),
    ("synthetic val_fraction=1", None, "data.val_fraction: 1.0 is not in [0, 1); give a share such as 0.1"),
    ("synthetic val_fraction=nan", None, "data.val_fraction: nan is not in [0, 1); give a share such as 0.1"),
    ("synthetic val_fraction=inf", None, "data.val_fraction: inf is not in [0, 1); give a share such as 0.1"),
    ("synthetic num_tokens=10 val_fraction=0.001", None, "data.val_fraction: 0.001 of this source is less than one "),
    ("synthetic num_tokens=0", None, "data.num_tokens: 0 is less than 1; give a number of tokens"),
    ("synthetic vocab_size=0", None, "data.vocab_size: 0 is not in [1, 2**32]; give a number of ids"),
    ("synthetic max_tokens=-1", None, "data.max_tokens: -1 is negative; give a count, or 0 for no limit"),
    ("synthetic format=talk", None, "data.format: 'talk' is not a choice; choose one of text, chat, prompt"),
    ("text gone.txt", None, "data.path: gone.txt does not exist; check the path"),
    ("text *.gone", None, "data.path: *.gone does not exist; check the path"),
    ("text bare", None, "data.path: bare holds no file with text (.txt .md .py .jsonl .parquet); name the files"),
    ("bin bare tokenizer=none", None, "data.path: bare holds no .bin file; name the files"),
    ("bin a.bin tokenizer=none", "odd", "data.path: a.bin has an odd number of bytes, and ids have two; copy it again"),
    ("bin a.bin", b"\x01\x00\x2c\x01", "data.tokenizer: an id is 300, and it has 256 ids; say which tokenizer made"),
    ("bin a.bin tokenizer=bpe:300", "ids.", "data.tokenizer: bpe:300 is trained on text, and here is none; name its"),
    ("text a.py", "", "data.path: a.py is empty; leave it out or give a file with text"),
    ("text a.txt", "a", "data: no tokens are left to train on; use more text or a smaller data.val_fraction"),
    ("text a.txt tokenizer=bpe:300", "ab", "data.tokenizer: bpe:300 finds only 257 entries in this text; use bpe:257"),
    ("text a.txt column=body", "a", "data.column: 'body' is asked for, and a.txt has no columns; leave it out, or"),
    ("text b.JSONL a.txt", FINE, "data.path: b.JSONL has a text in each row and a.txt has not; write the text as rows"),
    ("text a.txt", b"a" * 20 + b"\xff", "data.path: a.txt is not UTF-8 text: invalid start byte at offset 20;"),
    ("text a.txt", b"a" * 15 + b"\xc3(", "data.path: a.txt is not UTF-8 text: invalid continuation byte at offset"),
    ("text a.txt", b"a" * 40 + b"\xf0\x9f", "data.path: a.txt is not UTF-8 text: unexpected end of data at offset"),
    ("text a.txt", b"a" * 33 + b"\0b", "data.path: a.txt is not UTF-8 text: a NUL byte at offset 33; convert it to"),
    ("text a.csv", "text,label\nhello\n", "data.path: row 2 of a.csv has 1 values, and the first row 2; write it"),
    ("text a.csv", 'text\na\n"b\n', "data.path: a.csv cannot be read after row 2 (unexpected end of data); write it"),
    ("text a.csv", b"text\n\xff\n", "data.path: a.csv cannot be read after row 1 ('utf-8' codec can't decode byte"),
    ("text a.csv", "text,text\na,b\n", "data.path: a.csv has several columns 'text'; give each a name of its own"),
    ("text a.TSV", "body\tlabel\nx\t1\n", "data.column: a.TSV has no column 'text'; name one by --data.column; it has"),
    ("text a.feather", "ARROW1", "data.path: a.feather has columns, and those of .feather are not read; convert it"),
    ("text a.txt.gz", "plain", "data.path: a.txt.gz is compressed; unpack it; of compressed files .jsonl.gz, "),
    ("text a.jsonl.bz2", "BZh9", "data.path: a.jsonl.bz2 is compressed; unpack it; of compressed files .jsonl.gz, "),
    ("text a.jsonl.gz", "hi", "data: a.jsonl.gz failed (Not a gzipped file (b'hi')); the file is damaged, or no such"),
    ("text a.jsonl.zst", "hi", "data: a.jsonl.zst failed (zstd decompress error: Unknown frame descriptor); the file"),
    ("text a.parquet", "nothing of the kind", "data.path: a.parquet is no parquet file ("),
    ("text a.json", '{\n  "text": "one"\n}', "data.path: the line at byte 0 of a.json cannot be read (Expecting"),
    ("text a.json", '{"data": [{"text": "b"}]}', "data.path: the line at byte 0 of a.json has no key 'text'; write"),
    ("text a.json", '["a", "b"]', "data.path: row 1 of a.json cannot be read (a str is not an object); write one JSON"),
    ("text a.json", '[{"text": "a"}, {"text": "b"', "data.path: a.json cannot be read (Expecting ',' delimiter: line"),
    ("text a.json", '[{"text": "a"}]\n[{"text": "b"}]', "data.path: a.json cannot be read (Extra data: line 2 column"),
    ("text a.json", "[" * 100_000, "data.path: a.json cannot be read (nested too deeply); write it again, or as lines"),
    ("text a.jsonl", FINE + "{", "data.path: the line at byte 17 of a.jsonl cannot be read (Expecting property name"),
    ("text a.jsonl", FINE + "[" * 100_000, "data.path: the line at byte 17 of a.jsonl cannot be read (nested too"),
    ("text a.jsonl", FINE + '{"text": 1}', "data.path: the line at byte 17 of a.jsonl cannot be read (text is int,"),
    ("text a.jsonl", FINE + '{"text": "\\ud800"}', "data.path: the line at byte 17 of a.jsonl cannot be read ('utf-8'"),
    ("text a.jsonl column=body", FINE, "data.path: the line at byte 0 of a.jsonl has no key 'body'; write each row as"),
    ("text a.txt format=chat template=chatml", "hello", "data.format: chat reads rows, and the source a.txt has"),
    (CHAT, "\n\n", "data.path: a.jsonl holds no example; give rows to train on"),
    (CHAT, "[1]", "data.path: line 1 of a.jsonl cannot be read (a list is not an object)"),
    (CHAT, '{"messages": []}', "data.messages: the conversation in line 1 of a.jsonl is empty; leave the row out"),
    (CHAT, '{"messages": "hi"}', "data.messages: 'messages' in line 1"),
    (CHAT, '{"conversation": []}', "data.messages: line 1 of a.jsonl has no column 'messages'; name one of its"),
    (CHAT, '{"messages": [{"role": "user"}]}', "data.messages: message 1 in line 1 of a.jsonl has no role and content"),
    (CHAT, _says("user", '"a"'), "data.messages: the conversation in line 1 of a.jsonl has no turn of the assistant,"),
    (CHAT, _says("boss", '"a"'), "data.messages: message 1 in line 1 of a.jsonl has the role 'boss'; use one of"),
    (CHAT, _says("user", "[{}]"), "data.messages: the content of message 1 in line 1 of a.jsonl is a list, not text; "),
    (CHAT, _says("assistant", '""'), "data.messages: the content of message 1 in line 1 of a.jsonl is empty; leave"),
    (CHAT, _says("assistant", "null"), "data.messages: the content of message 1 in line 1 of a.jsonl is empty"),
    (CHAT, _says("assistant", '"\\ud800"'), "data.path: line 1 of a.jsonl holds half of a surrogate pair, which is no"),
    (PAIRS, '{"prompt": "a"}', "data.completion: line 1 of a.jsonl has no column 'completion'"),
    (PAIRS, '{"prompt": "a", "completion": ""}', "data.completion: 'completion' in line 1 of a.jsonl is empty"),
    (PAIRS, '{"prompt": 1, "completion": "a"}', "data.prompt: 'prompt' in line 1 of a.jsonl is a int, not text"),
    (PAIRS, '{"prompt": [], "completion": []}', "data.prompt: 'prompt' in line 1 of a.jsonl is a list, not text; name "
     "columns of text; lists of messages are --data.format chat"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_data_that_cannot_be_are_refused_in_one_line_and_leave_nothing(row, tmp_path, monkeypatch):
    words, content, line = row
    monkeypatch.setattr("zeroshard.data.documents.CHUNK_BYTES", 16)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    given, paths = {}, []
    for word in words.split()[1:]:
        name, is_given, value = word.partition("=")
        if is_given:
            given[name] = type(getattr(DataSpec, name))(value)
        else:
            paths.append(name)
    for path in paths if content is not None else ():
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as said:
        prepare(DataSpec(words.split()[0], tuple(paths), **given), "out/data", num_workers=1)
    assert str(said.value).startswith(line)
    assert said.value.todo
    assert "\n" not in str(said.value)
    assert not (tmp_path / "out/data").exists()
