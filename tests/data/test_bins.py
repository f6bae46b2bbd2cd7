import numpy as np
import pytest

from zeroshard.data.meta import read_meta
from zeroshard.data.prepare import DataSpec, prepare
from zeroshard.data.tokens import TokenDataset
from zeroshard.host.errors import UserError


def llm_c(path, ids, magic=20240520, version=1, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())


def ids(folder, split):
    tokens = TokenDataset.open(folder, split)
    return tokens.window(0, tokens.num_tokens).tolist()


def _nanogpt(folder):
    """``train.bin`` of 1,000 ids and ``val.bin`` of 90 in a folder ``set``."""
    (folder / "set").mkdir()
    files = folder / "set" / "train.bin", folder / "set" / "val.bin"
    for file, made in zip(files, (np.arange(1000) % 50_257, np.arange(90) + 7), strict=True):
        made.astype("<u2").tofile(file)
    return files


def test_nanogpts_files_are_taken_as_they_are(tmp_path):
    _nanogpt(tmp_path)
    out = prepare(DataSpec("bin", (str(tmp_path / "set"),), "gpt2"), tmp_path / "out")
    assert (ids(out, "train"), ids(out, "val")) == (list(range(1000)), list(range(7, 97)))
    meta = read_meta(out)
    assert (meta.tokenizer, meta.vocab_size, meta.dtype, meta.eos_id) == ("gpt2", 50_257, "uint16", 50_256)


def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path):
    llm_c(tmp_path / "train.bin", [1, 2, 3], 20240801, 7, "<u4")
    out = prepare(DataSpec("bin", (str(tmp_path / "train.bin"),), "none", 0.0), tmp_path / "out")
    assert read_meta(out).dtype == "uint16"
    assert ids(out, "train") == [1, 2, 3]
    assert (out / "train" / "tokens-00000.bin").stat().st_size == 6


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_llm_cs_header_says_how_wide_ids_are(tmp_path, magic, version, dtype):
    top = 70_000 if dtype == "<u4" else 60_000
    llm_c(tmp_path / "a_train_000001.bin", [1, 2, top], magic, version, dtype)
    llm_c(tmp_path / "a_train_000002.bin", [4], magic, version, dtype)
    llm_c(tmp_path / "a_val_000000.bin", [5, 6], magic, version, dtype)
    out = prepare(DataSpec("bin", (str(tmp_path / "a_*.bin"),), "none"), tmp_path / "out")
    assert (ids(out, "train"), ids(out, "val")) == ([1, 2, top, 4], [5, 6])
    assert read_meta(out).vocab_size == top + 1


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("name", "is_val"),
    [
        ("val", True),
        ("edu_val_000001", True),
        ("Valid", True),
        ("a.validation-2", True),
        ("val000", True),
        ("retrieval-000", False),
        ("trainval", False),
        ("valley", False),
        ("eval", False),
    ],
)
def test_a_file_validates_by_a_whole_word_of_its_name(tmp_path, name, is_val):
    np.arange(10, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    np.arange(50, 60, dtype="<u2").tofile(tmp_path / "b_val.bin")
    np.arange(90, 99, dtype="<u2").tofile(tmp_path / "c.bin")
    out = prepare(DataSpec("bin", (str(tmp_path / "*.bin"),), "none"), tmp_path / "out")
    assert (0 in ids(out, "val")) is is_val
    assert (0 in ids(out, "train")) is not is_val


def test_where_no_file_validates_the_end_does(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "tokens.bin")
    out = prepare(DataSpec("bin", (str(tmp_path / "tokens.bin"),), "none"), tmp_path / "out")
    assert (ids(out, "train"), ids(out, "val")) == (list(range(90)), list(range(90, 100)))


def test_files_that_are_cut_short_are_refused(tmp_path):
    llm_c(tmp_path / "a.bin", [1, 2, 3])
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-2])
    with pytest.raises(UserError, match=r"a\.bin has 1,028 bytes where its header says 1,030"):
        prepare(DataSpec("bin", (str(tmp_path / "a.bin"),), "none"), tmp_path / "out")
    llm_c(tmp_path / "c.bin", [1], version=3)
    with pytest.raises(UserError, match=r"c\.bin is of llm\.c's version 3"):
        prepare(DataSpec("bin", (str(tmp_path / "c.bin"),), "none"), tmp_path / "out")


def test_a_suffix_may_be_of_any_case_and_a_file_is_read_once(tmp_path):
    files = _nanogpt(tmp_path)
    for file in files:
        file.rename(file.with_suffix(".BIN"))
    folder = tmp_path / "set"
    (tmp_path / "link.bin").symlink_to(folder / "train.BIN")
    paths = (str(folder), str(folder / "train.BIN"), str(tmp_path / "link.bin"))
    out = prepare(DataSpec("bin", paths, "gpt2"), tmp_path / "out")
    assert (len(ids(out, "train")), len(ids(out, "val"))) == (1000, 90)
