import json
from dataclasses import replace

import pytest

from zeroshard.checkpoint import manifest as manifests
from zeroshard.checkpoint.manifest import FileEntry, Manifest, Piece, TensorEntry, dump, merge, parse
from zeroshard.host.errors import UserError


def _piece(start, stop, file, offset=16):
    return Piece((start, stop), file, f"k{start}", offset, "2" * 64)


@pytest.fixture
def manifest():
    pieces = (_piece(0, 4, "a.safetensors"), _piece(4, 6, "b.safetensors"))
    return Manifest(
        step=7,
        world_size=2,
        files={"a.safetensors": FileEntry(32, 16, "0" * 64), "b.safetensors": FileEntry(24, 16, "1" * 64)},
        tensors=(TensorEntry("weight", "param", "F32", (2, 3), pieces),),
        extra={"config": {"lr": 3e-4, "name": "é"}},
        versions={"torch": "2.13.0"},
        param_groups=({"lr": 0.1, "betas": [0.9, 0.99], "params": ["weight"]},),
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
    path.write_text(whole.replace(" ", "\n", 1))
    with pytest.raises(UserError, match=r"manifest\.json: is damaged"):
        parse(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"manifest\.json: is damaged"):
        parse(path)


def test_a_manifest_of_another_version_is_refused(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroshard.checkpoint.manifest_text.VERSION", 99)
    text = dump(manifest)
    monkeypatch.undo()
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(UserError, match="version 99"):
        parse(path)


def test_the_ranks_entries_merge_into_whole_tensors():
    left = TensorEntry("w", "param", "F32", (5,), (_piece(0, 3, "a"),))
    right = TensorEntry("w", "param", "F32", (5,), (_piece(3, 5, "b"),))
    (whole,) = merge([right, left])
    assert {piece.interval for piece in whole.pieces} == {(0, 3), (3, 5)}


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (TensorEntry("w", "param", "F32", (5,), (_piece(4, 5, "b"),)), r"elements \[3, 4\) are in no piece"),
        (TensorEntry("w", "param", "F32", (5,), (_piece(2, 5, "b"),)), "in two pieces"),
        (TensorEntry("w", "param", "BF16", (5,), (_piece(3, 5, "b"),)), "ranks disagree"),
        (TensorEntry("w", "param", "F32", (6,), (_piece(3, 6, "b"),)), "ranks disagree"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(other, complaint):
    with pytest.raises(ValueError, match=complaint):
        merge([TensorEntry("w", "param", "F32", (5,), (_piece(0, 3, "a"),)), other])


def test_infinity_cannot_get_into_a_manifest(manifest):
    with pytest.raises(ValueError, match="Out of range float"):
        dump(Manifest(1, 1, {}, (), {"loss": float("inf")}))
    assert json.loads(dump(manifest))["sha256"]


def test_regions_cover_every_byte_of_every_file_once(manifest):
    regions = [(region.file[0], region.offset, region.num_bytes) for region in manifest.regions()]
    assert regions == [("a", 0, 16), ("a", 16, 16), ("b", 0, 16), ("b", 16, 8)]
    assert manifest.num_bytes == 56


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: {"files": m.files | {"../a.safetensors": FileEntry(16, 16, "")}}, "is no file of a checkpoint"),
        (lambda m: {"files": {"a.safetensors": m.files["a.safetensors"]}}, "is not listed"),
        (lambda m: {"files": m.files | {"b.safetensors": FileEntry(25, 16, "")}}, "the pieces end at 24"),
        (lambda m: {"tensors": (replace(m.tensors[0], shape=(7,)),)}, "is not tiled"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(manifest, tmp_path, change, complaint):
    path = tmp_path / "manifest.json"
    path.write_text(dump(replace(manifest, **change(manifest))))
    with pytest.raises(UserError, match=complaint):
        parse(path)


@pytest.mark.parametrize("text", ["[]", "{}", "7", "[" * 100_000, '{"step": NaN}'])
def test_json_that_is_no_manifest_is_refused(tmp_path, text):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is damaged"):
        parse(path)


def test_a_manifest_is_hashed_as_it_lies_there_and_never_written_again(manifest, tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    path.write_text(dump(manifest))

    def dumps(*args, **kwargs):
        raise AssertionError("a manifest was written again to be read")

    monkeypatch.setattr(json, "dumps", dumps)
    assert parse(path) == manifest


def test_inside_parsed_once_the_same_bytes_are_parsed_once(manifest, tmp_path, monkeypatch):
    path, other = tmp_path / "manifest.json", tmp_path / "other.json"
    path.write_text(dump(manifest))
    other.write_text(dump(replace(manifest, step=8)))
    num_parsed, of_content = [], manifests._of_content
    monkeypatch.setattr(manifests, "_of_content", lambda *args: num_parsed.append(1) or of_content(*args))
    with manifests.parsed_once():
        assert parse(path) is parse(path)
        assert len(num_parsed) == 1
        assert parse(other).step == 8
        path.write_text(dump(replace(manifest, step=9)))  # its date may be the same
        assert parse(path).step == 9
    assert parse(path) is not parse(path)
    assert len(num_parsed) == 5


def test_a_manifest_larger_than_any_is_not_read(tmp_path):
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(1 << 42)  # takes no room on the disk
    with pytest.raises(UserError, match="it has more than 1,073,741,824 bytes"):
        parse(path)
