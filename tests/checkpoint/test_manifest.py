import json

import pytest

from zeroshard.checkpoint.manifest import FileEntry, Manifest, Piece, TensorEntry, dump, merge, parse
from zeroshard.errors import UserError


@pytest.fixture
def manifest():
    pieces = (Piece((0, 4), "a.safetensors", "k0"), Piece((4, 6), "b.safetensors", "k1"))
    return Manifest(
        step=7,
        world_size=2,
        files={"a.safetensors": FileEntry(100, "0" * 64), "b.safetensors": FileEntry(50, "1" * 64)},
        tensors=(TensorEntry("weight", "param", "F32", (2, 3), pieces),),
        extra={"config": {"lr": 3e-4, "name": "é"}},
    )


def test_a_manifest_survives_the_disk(manifest, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(dump(manifest))
    assert parse(path) == manifest


def test_any_changed_byte_of_a_manifest_is_refused_by_name(manifest, tmp_path):
    path = tmp_path / "manifest.json"
    whole = dump(manifest)
    path.write_text(whole.replace('"step": 7', '"step": 8'))
    with pytest.raises(UserError, match=r"manifest\.json: is damaged"):
        parse(path)
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"manifest\.json: is damaged"):
        parse(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"manifest\.json: is damaged"):
        parse(path)


def test_a_manifest_of_another_version_is_refused(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroshard.checkpoint.manifest.VERSION", 99)
    text = dump(manifest)
    monkeypatch.undo()
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(UserError, match="version 99"):
        parse(path)


def test_the_ranks_entries_merge_into_whole_tensors():
    left = TensorEntry("w", "param", "F32", (5,), (Piece((0, 3), "a", "k"),))
    right = TensorEntry("w", "param", "F32", (5,), (Piece((3, 5), "b", "k"),))
    (whole,) = merge([right, left])
    assert {piece.interval for piece in whole.pieces} == {(0, 3), (3, 5)}


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (
            TensorEntry("w", "param", "F32", (5,), (Piece((4, 5), "b", "k"),)),
            r"elements \[3, 4\) are in no piece",
        ),
        (TensorEntry("w", "param", "F32", (5,), (Piece((2, 5), "b", "k"),)), "in two pieces"),
        (TensorEntry("w", "param", "BF16", (5,), (Piece((3, 5), "b", "k"),)), "ranks disagree"),
        (TensorEntry("w", "param", "F32", (6,), (Piece((3, 6), "b", "k"),)), "ranks disagree"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(other, complaint):
    with pytest.raises(ValueError, match=complaint):
        merge([TensorEntry("w", "param", "F32", (5,), (Piece((0, 3), "a", "k"),)), other])


def test_infinity_cannot_get_into_a_manifest(manifest):
    with pytest.raises(ValueError, match="Out of range float"):
        dump(Manifest(1, 1, {}, (), {"loss": float("inf")}))
    assert json.loads(dump(manifest))["sha256"]
