"""What is in a file's place and is none is refused in a line, and never waited for."""

import os
import socket

import pytest

from zeroshard.host.regular_files import json_of, open_regular, read_bytes, require_regular, toml_of


def _fifo(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


PLACES = {
    "a named pipe, not a file": _fifo,
    "a socket, not a file": _socket,
    "a device, not a file": lambda path: path.symlink_to("/dev/zero"),
    "Is a directory": lambda path: path.mkdir(),
    "Too many levels of symbolic links": lambda path: path.symlink_to(path.name),
    "No such file": lambda path: path.symlink_to(path.with_name("nowhere")),
}


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_what_is_no_file_is_refused_by_its_kind(tmp_path, monkeypatch, what, flags):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    path = tmp_path / "config.toml"
    PLACES[what](path.relative_to(tmp_path) if what.startswith("a socket") else path)
    with pytest.raises(OSError) as refused:  # noqa: PT011 -- what matters is what it says
        open_regular(path, flags)
    assert what in refused.value.strerror
    assert refused.value.filename == str(path)


def test_a_name_that_no_file_can_have_is_an_os_error():
    with pytest.raises(OSError, match="its name holds a NUL byte"):
        open_regular("a\0b")
    with pytest.raises(OSError, match="File name too long"):
        require_regular("a" * 5000)


def test_a_pipe_that_takes_the_place_of_a_file_between_look_and_open_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text("")
    looked = os.stat

    def look(name, **kwargs):
        found = looked(name, **kwargs)
        path.unlink()
        os.mkfifo(path)
        return found

    monkeypatch.setattr(os, "stat", look)
    with pytest.raises(OSError, match="a named pipe, not a file"):
        open_regular(path)


def test_a_link_is_followed_only_where_that_is_meant(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"kept")
    link.symlink_to(path)
    assert read_bytes(link) == b"kept"
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_regular(link, os.O_RDWR | os.O_CREAT | os.O_TRUNC, follow=False)
    assert path.read_bytes() == b"kept"
    os.close(open_regular(path, os.O_WRONLY | os.O_TRUNC, follow=False))
    assert path.read_bytes() == b""
    os.close(open_regular(tmp_path / "new", os.O_WRONLY | os.O_CREAT, follow=False))
    assert (tmp_path / "new").exists()


@pytest.mark.parametrize("num_bytes", [9, 11, 1 << 40])
def test_no_more_is_read_than_the_limit(tmp_path, num_bytes):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(num_bytes)  # takes no room on the disk
    if num_bytes < 10:
        assert read_bytes(path, 10) == bytes(num_bytes)
    else:
        with pytest.raises(OSError, match="it has more than 10 bytes"):
            read_bytes(path, 10)
    assert len(read_bytes("/proc/self/status", 1 << 20)) > 100  # it says that it has none
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_bytes("/proc/self/status", 10)


def test_json_that_nobody_can_use_is_as_bad_as_any_other_that_is_none():
    assert json_of('{"a": [1]}') == json_of(b'{"a": [1]}') == {"a": [1]}
    for text, what in (
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting property name"),
        (f'{{"world_size": 1{"0" * 400}}}', "an integer of 401 digits"),
    ):
        with pytest.raises(ValueError, match=what):
            json_of(text)


@pytest.mark.parametrize("digits", ["0x" + "f" * 5000, str(2**64), f"-{2**65}"])
def test_an_integer_that_toml_does_not_promise_is_refused(digits):
    assert toml_of(f"a = {2**63 - 1}\nb = [0x10]") == {"a": 2**63 - 1, "b": [16]}
    with pytest.raises(ValueError, match=r"^an integer of \d+ bits$"):
        toml_of(f"[model]\nseed = [1, {digits}]")
