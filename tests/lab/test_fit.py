import pytest
import torch

from zeroshard.comm import run_threads
from zeroshard.lab.fit import fitting_stage, num_free_bytes, stage_bytes
from zeroshard.models import build_model
from zeroshard.zero import Zero

CPU = torch.device("cpu")
WORLD_SIZE = 3


def _model(device="cpu"):
    with torch.device(device):
        return build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides={"n_layer": 2, "n_head": 3, "n_embd": 9})


def test_what_is_predicted_without_memory_is_what_an_engine_holds():
    def rank_main(comm, stage):
        model = _model()
        zero = Zero(model, stage=stage, units=list(model.blocks), comm=comm)
        optim = zero.optimizer(torch.optim.AdamW)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):
            optim.zero_grad()
            model(tokens, tokens).backward()
            optim.step()
        return sum(zero.memory_bytes().values())

    predicted = stage_bytes(_model("meta"), WORLD_SIZE, torch.float32)
    for stage in (0, 1):
        assert predicted[stage] == max(run_threads(lambda comm, stage=stage: rank_main(comm, stage), WORLD_SIZE))
    for stage in (2, 3):  # and what comes and goes beside it
        assert predicted[stage] > max(run_threads(lambda comm, stage=stage: rank_main(comm, stage), WORLD_SIZE))
    assert predicted[0] > predicted[1]


@pytest.mark.parametrize("stage", range(4))
def test_the_lowest_stage_with_room_for_activations_is_chosen(stage):
    model = _model("meta")
    free_bytes = int(stage_bytes(model, WORLD_SIZE, torch.float32)[stage] / 0.8) + 8
    chosen, why = fitting_stage(model, WORLD_SIZE, torch.float32, CPU, free_bytes)
    needed = stage_bytes(model, WORLD_SIZE, torch.float32)
    assert chosen == min(s for s in needed if needed[s] <= needed[stage])
    assert "does not fit" not in why


def test_where_nothing_fits_the_highest_stage_is_tried_and_that_is_said():
    chosen, why = fitting_stage(_model("meta"), WORLD_SIZE, torch.bfloat16, CPU, 1)
    assert chosen == 3
    assert "does not fit either" in why


def test_a_ranks_share_of_what_is_free():
    assert 0 < num_free_bytes(CPU, 4) < num_free_bytes(CPU, 1)
