import torch

from zeroshard.lab.predict.recorder import StorageEvents


def test_allocations_views_and_ends_are_told_in_their_order():
    heard, ran = [], []
    there = torch.zeros(5)
    events = StorageEvents(lambda storage, change: heard.append((storage, change)), lambda *op: ran.append(str(op[0])))
    events.ignore([there])
    with events:
        made = there + 1
        view = made[1:]
        there.add_(1)
        del made
        other = torch.empty(7, dtype=torch.float64)
        del view
    assert [change for _, change in heard] == [20, 56, -20]
    assert heard[0][0] == heard[2][0] != heard[1][0]
    assert ran[0] == "aten.add.Tensor"
    del other
    assert heard[-1] == (heard[1][0], -56)
