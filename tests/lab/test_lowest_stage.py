import pytest
import torch

from zeroshard.lab.planner.lowest_stage import fitting_stage, num_free_bytes, stage_bytes
from zeroshard.lab.predict.dry_run import dry_run
from zeroshard.lab.predict.model_trace import tokens_and_targets
from zeroshard.models import build_model
from zeroshard.zero import STAGES

CPU = torch.device("cpu")
WORLD_SIZE = 3


def _model(device="cpu"):
    with torch.device(device):
        return build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides={"n_layer": 2, "n_head": 3, "n_embd": 9})


SHAPES = {"micro_batch": 2, "seq_len": 8}


def test_what_is_predicted_without_memory_is_what_a_rank_holds_at_its_fullest():
    predicted = stage_bytes(_model("meta"), WORLD_SIZE, torch.float32, CPU, **SHAPES)
    for stage, row in STAGES.items():
        model = _model()
        measured = dry_run(
            model,
            tokens_and_targets(8),
            world_size=WORLD_SIZE,
            strategy=row,
            micro_batch=2,
            units=model.units,
            num_micro=2,
        )
        assert predicted[stage] == pytest.approx(measured.peak_bytes, abs=2048)
    assert predicted[0] > predicted[1]


@pytest.mark.parametrize("stage", range(4))
def test_the_lowest_stage_that_fits_is_chosen(stage):
    model = _model("meta")
    needed = stage_bytes(model, WORLD_SIZE, torch.float32, CPU, **SHAPES)
    free_bytes = int(needed[stage] / 0.9) + 8
    chosen, why = fitting_stage(model, WORLD_SIZE, torch.float32, CPU, **SHAPES, free_bytes=free_bytes)
    assert chosen == min(s for s in needed if needed[s] <= needed[stage])
    assert "does not fit" not in why


def test_where_nothing_fits_the_highest_stage_is_tried_and_that_is_said():
    chosen, why = fitting_stage(_model("meta"), WORLD_SIZE, torch.bfloat16, CPU, **SHAPES, free_bytes=1)
    assert chosen == 3
    assert "does not fit either" in why


def test_a_ranks_share_of_what_is_free():
    assert 0 < num_free_bytes(CPU, 4) < num_free_bytes(CPU, 1)
