import torch

from zeroshard.lab.predict import recorder
from zeroshard.lab.predict.recorder import StorageEvents
from zeroshard.lab.predict.work import work_of

ATEN = torch.ops.aten


def _computed(x, number):
    """Results of operations that make tensors, that return views with and without saying so, and that change one."""
    made = [x + number, ATEN.native_layer_norm(x, [4], None, None, 1e-5)[1], torch.arange(3, device=x.device) * number]
    views = [x.view(-1), ATEN._unsafe_view(x, [2, 2, 4]), x.t()[1:]]
    changed = torch.zeros(4, 4, device=x.device).add_(x)
    return made, views, changed


def test_what_is_remembered_of_an_operation_is_what_it_returns(monkeypatch):
    monkeypatch.setattr(recorder, "_known", {})
    x, runs = torch.empty(4, 4, device="meta"), []
    for number in (2, 2.0, True, 2, 2.0, True):
        events = []
        with StorageEvents(lambda _, change, events=events: events.append(change), lambda *_: None):
            made, views, changed = _computed(x, number)
        assert all(view.untyped_storage()._cdata == x.untyped_storage()._cdata for view in views)
        runs.append((events, [(each.shape, each.stride(), each.dtype) for each in (*made, *views, changed)]))
        remembered = len(recorder._known)
        del made, views, changed
    assert runs[:3] == runs[3:]
    assert runs[0] != runs[1]  # a product of integers and a fraction is no integer
    assert 0 < remembered < 20


def test_what_is_remembered_of_an_operations_cost_is_what_it_costs():
    """Two expanded tensors of one shape and the same strides have the bytes of their storages, and so do costs."""
    row, costs = torch.empty(1, 4, device="meta"), []

    def ran(func, args, kwargs, result, alike):
        costs.append((work_of(func, args, kwargs, result, alike), work_of(func, args, kwargs, result), alike))

    with StorageEvents(lambda *_: None, ran):
        for _ in range(2):
            for x in (row.expand(512, 4), torch.empty(8, 4, device="meta")[:1].expand(512, 4), row.t()):
                x + 1
                x.cos()
    assert all(remembered == computed for remembered, computed, _ in costs)
    assert sum(alike is not None for *_, alike in costs) >= 12
