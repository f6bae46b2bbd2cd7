import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.data.documents import Document, text_document
from zeroshard.data.split import MANY_DOCUMENTS, Holdout, cut, validates


def split_documents(documents, num_documents, val_fraction):
    return [side for document in documents for side in Holdout(val_fraction, num_documents).sides(document)]


def text_of(document):
    return "".join(document.chunks())


def in_chunks(chunks):
    return Document("text", len("".join(chunks).encode()), lambda: iter(chunks))


@pytest.mark.redundant
@given(st.lists(st.text(st.sampled_from("ab\né🙂"), min_size=1, max_size=12), max_size=5), st.data())
def test_head_and_tail_are_the_document(chunks, data):
    whole = in_chunks(chunks)
    at_byte = data.draw(st.integers(0, whole.num_bytes))
    head, tail = cut(whole, at_byte)
    assert text_of(head) + text_of(tail) == "".join(chunks)
    assert len(text_of(head).encode()) <= at_byte
    assert text_of(head) == text_of(head)  # a document can be read again


def test_a_cut_without_lines_never_halves_a_character():
    head, tail = cut(text_document("éééé", "text"), 5)
    assert (text_of(head), text_of(tail)) == ("éé", "éé")


def test_many_documents_are_split_whole_and_spread_evenly():
    """By chance: of 640 documents 64 are wanted, give or take three times the square root of 640 x 0.1 x 0.9."""
    documents = [text_document(f"{i}\n" * (i % 7 + 1), str(i)) for i in range(10 * MANY_DOCUMENTS)]
    sides = {"train": [], "val": []}
    for split, document in split_documents(documents, len(documents), 0.1):
        sides[split].append(document)
    assert sorted(map(int, (each.name for side in sides.values() for each in side))) == list(range(len(documents)))
    assert not {each.name for each in sides["train"]} & {each.name for each in sides["val"]}
    num_bytes = {split: sum(each.num_bytes for each in side) for split, side in sides.items()}
    assert abs(num_bytes["val"] / sum(num_bytes.values()) - 0.1) < 0.03
    for quarter in range(4):
        width = len(documents) // 4
        inside = [each for each in sides["val"] if int(each.name) // width == quarter]
        assert 0.03 * width < len(inside) < 0.17 * width


def test_few_documents_give_the_tail_of_each():
    documents = [text_document("".join(f"{name}{i}\n" for i in range(10)), name) for name in "ab"]
    parts = [(split, text_of(document)) for split, document in split_documents(documents, 2, 0.2)]
    assert [split for split, _ in parts] == ["train", "val", "train", "val"]
    assert parts[1][1] == "a8\na9\n"
    assert parts[3][1] == "b8\nb9\n"


@pytest.mark.redundant
@given(st.text(max_size=40), st.integers(0, 40), st.floats(0, 0.99), st.floats(0, 0.99))
def test_what_validates_depends_on_the_content_alone_and_stays_at_a_larger_fraction(text, at, fraction, other):
    low, high = sorted((fraction, other))
    assert validates((text,), low) == validates((text[:at], text[at:]), low)
    assert validates((text,), low) <= validates((text,), high)
    assert not validates((text,), 0.0)


def test_the_rule_is_the_same_today_and_tomorrow():
    """Folders and runs of years name the rule: another answer would be another rule."""
    assert [i for i in range(100) if validates((f"document {i}\n",), 0.1)] == [7, 8, 34, 53, 56, 57, 76, 83, 88, 92, 99]


@pytest.mark.parametrize("many", [True, False])
def test_texts_in_memory_are_split_as_documents_are(many):
    num = MANY_DOCUMENTS if many else 2
    holdout = Holdout(0.3, num)
    for i in range(30):
        text = f"line {i}\n" * (i + 1)
        sides = [(split, text_of(side)) for split, side in holdout.sides(text_document(text, ""))]
        assert list(holdout.texts(text)) == [(split, side) for split, side in sides if side]
