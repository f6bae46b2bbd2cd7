from hypothesis import given
from hypothesis import strategies as st

from zeroshard.data.documents import Document, text_document
from zeroshard.data.split import MANY_DOCUMENTS, cut, split_documents


def text_of(document):
    return "".join(document.chunks())


def in_chunks(chunks):
    return Document("text", len("".join(chunks).encode()), lambda: iter(chunks))


@given(st.lists(st.text(st.sampled_from("ab\né🙂"), min_size=1, max_size=12), max_size=5), st.data())
def test_head_and_tail_are_the_document(chunks, data):
    whole = in_chunks(chunks)
    at_byte = data.draw(st.integers(0, whole.num_bytes))
    head, tail = cut(whole, at_byte)
    assert text_of(head) + text_of(tail) == "".join(chunks)
    assert len(text_of(head).encode()) <= at_byte
    assert text_of(head) == text_of(head)  # a document can be read again


def test_a_cut_falls_at_a_line_end():
    head, tail = cut(text_document("one\ntwo\nthree\n", "text"), 9)
    assert (text_of(head), text_of(tail)) == ("one\ntwo\n", "three\n")


def test_a_cut_without_lines_never_halves_a_character():
    head, tail = cut(text_document("éééé", "text"), 5)
    assert (text_of(head), text_of(tail)) == ("éé", "éé")


def test_many_documents_are_split_whole_and_spread_evenly():
    documents = [text_document(f"{i}\n" * (i % 7 + 1), str(i)) for i in range(10 * MANY_DOCUMENTS)]
    sides = {"train": [], "val": []}
    for split, document in split_documents(documents, len(documents), 0.1):
        sides[split].append(document)
    assert sorted(map(int, (each.name for side in sides.values() for each in side))) == list(range(len(documents)))
    assert not {each.name for each in sides["train"]} & {each.name for each in sides["val"]}
    num_bytes = {split: sum(each.num_bytes for each in side) for split, side in sides.items()}
    assert abs(num_bytes["val"] / sum(num_bytes.values()) - 0.1) < 0.01
    for quarter in range(4):
        width = len(documents) // 4
        inside = [each for each in sides["val"] if int(each.name) // width == quarter]
        assert 0.07 * width < len(inside) < 0.13 * width


def test_few_documents_give_the_tail_of_each():
    documents = [text_document("".join(f"{name}{i}\n" for i in range(10)), name) for name in "ab"]
    parts = [(split, text_of(document)) for split, document in split_documents(documents, 2, 0.2)]
    assert [split for split, _ in parts] == ["train", "val", "train", "val"]
    assert parts[1][1] == "a8\na9\n"
    assert parts[3][1] == "b8\nb9\n"


def test_without_validation_everything_trains():
    documents = [text_document("a\n", "a"), text_document("b\n", "b")]
    assert [split for split, _ in split_documents(documents, 2, 0.0)] == ["train", "train"]
