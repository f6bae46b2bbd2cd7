import pytest
import torch
from torch import nn

from tiny_runs import events_of
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.toml import dump_toml, read_given
from zeroshard.train.loop.validation_loss import evaluate
from zeroshard.train.start import run_training

CPU = torch.device("cpu")


class MeanToken(nn.Module):
    """Its loss is the mean token; it remembers in which mode it was called."""

    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, tokens_BT, targets_BT):
        assert not torch.is_grad_enabled()
        self.modes.append(self.training)
        return tokens_BT.float().mean()


def _batches(values):
    return [(torch.full((2, 3), value), torch.zeros(2, 3), torch.tensor(weight)) for value, weight in values]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_over_all_batches_is_the_same_at_any_world_size(world_size):
    values = [5, 1, 9, 2]

    def rank_main(comm):
        mine = values[comm.rank :: world_size]
        padding = [(99, 0)] * (-(-len(values) // world_size) - len(mine))  # run, never counted
        return evaluate(MeanToken(), _batches([(value, 1) for value in mine] + padding), comm, CPU)

    assert run_threads(rank_main, world_size) == [4.25] * world_size


def test_a_batch_of_no_weight_may_even_be_infinite():
    values = ((1.0, 1), (torch.inf, 0))
    batches = [(torch.tensor([[value]]), torch.zeros(1, 1), torch.tensor(weight)) for value, weight in values]
    assert evaluate(MeanToken(), batches, LocalCommunicator(), CPU) == 1.0


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_that_it_was_in(training):
    model = MeanToken().train(training)
    evaluate(model, _batches([(1, 1)]), LocalCommunicator(), CPU)
    assert model.modes == [False]
    assert model.training is training


def test_rows_in_micro_batches_are_counted_once_and_stay(tmp_path):
    first = TrainConfig(micro_batch_size=4, eval_batches=3)
    assert first.eval_rows == 12
    (tmp_path / "config.toml").write_text(dump_toml(first))
    raw = read_given(str(tmp_path / "config.toml"))
    again = validate(TrainConfig, {**raw, "micro_batch_size": 1})
    assert (again.eval_rows, again.eval_batches) == (12, 0)
    assert TrainConfig(eval_batches=20, eval_rows=0, micro_batch_size=2).eval_rows == 40


@pytest.mark.redundant
def test_the_validation_loss_is_the_same_with_any_micro_batch(tiny_config, tmp_path):
    losses = []
    for size in (1, 2, 4):
        config = tiny_config(micro_batch_size=size, global_batch_size=4, eval_rows=7, out=str(tmp_path / str(size)))
        run_training(config)
        losses.append([event["loss"] for event in events_of(config.out, "eval")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
