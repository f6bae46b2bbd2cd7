"""The probe of updates: the same bits on both paths of a CPU, and a path that differs is seen and measured."""

import pytest
import torch

from zeroshard.zero.offload import probe
from zeroshard.zero.offload.probe import HOST, NUM_ELEMENTS, Comparison, compare_updates

CLASSES = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "for loop": (torch.optim.AdamW, {"foreach": False}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "fused amsgrad": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Muon": (torch.optim.Muon, {}),
}


def _optimizer(cls, settings, shape=(4, 4)):
    return cls([torch.nn.Parameter(torch.ones(shape))], lr=1e-2, **settings)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", CLASSES)
def test_pieces_on_a_thread_have_the_bits_of_a_tensor(name, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = compare_updates(_optimizer(*CLASSES[name]), HOST)
    finally:
        torch.set_num_threads(before)
    assert (found.num_different, found.most_ulp) == (0, 0)
    assert str(found) == "update on the host: same bits as on the device"


class Other(torch.optim.SGD):
    """Pieces are updated otherwise than whole tensors: in their first element by two ulp, or to NaN."""

    wrong = "ulp"

    def step(self, closure=None):
        super().step()
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.numel() < NUM_ELEMENTS and self.wrong == "ulp":
                param.data[3:4].view(torch.int32).add_(2)
            elif param.numel() < NUM_ELEMENTS:
                param.data[3] = float("nan")


def test_a_path_that_differs_is_seen_and_measured(monkeypatch):
    monkeypatch.setattr(probe, "NUM_STEPS", 1)
    found = compare_updates(_optimizer(Other, {}), HOST)
    assert str(found) == "update on the host: differs in 3 of 1,024 elements, weights by at most 2 ulp"
    monkeypatch.setattr(Other, "wrong", "nan")
    found = compare_updates(_optimizer(Other, {}), HOST)
    assert found == Comparison(3, None)
    assert str(found) == "update on the host: differs in 3 of 1,024 elements, one is NaN"


def test_states_that_differ_are_seen(monkeypatch):
    joined = probe._joined

    def other(parts):
        result = joined(parts)
        return result + 1.0 if len(parts) > 1 and not result.dim() else result

    monkeypatch.setattr(probe, "_joined", other)
    found = compare_updates(_optimizer(torch.optim.AdamW, {}), HOST)
    assert (found.num_different, found.most_ulp) == (NUM_ELEMENTS, 0)


def test_the_settings_of_every_group_are_probed_and_the_optimizer_does_not_change(monkeypatch):
    seen = []
    both = probe._both_paths

    def looks(cls, settings, *args, **kwargs):
        seen.append((settings["lr"], settings["weight_decay"]))
        return both(cls, settings, *args, **kwargs)

    monkeypatch.setattr(probe, "_both_paths", looks)
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optim = torch.optim.AdamW([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "weight_decay": 0.0}], lr=1e-3)
    assert compare_updates(optim, HOST).num_different == 0
    assert seen == [(0.5, 0.01), (1e-3, 0.0)]
    assert not optim.state
    assert all(torch.equal(param, torch.ones(2)) for param in params)


def test_ulps_count_the_numbers_between():
    one = torch.tensor([1.0, 0.0, -1.0, float("nan"), 1.0])
    other = torch.tensor([1.0 + 2**-22, -0.0, -1.0 - 2**-23, float("nan"), 1.0])
    assert probe._ulps(one, other).tolist() == [2, 1, 1, 0, 0]
    tiny = torch.tensor([1e-45]), torch.tensor([-1e-45])
    assert probe._ulps(*tiny).tolist() == [3]
