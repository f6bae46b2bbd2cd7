"""Batches are a function of the step, the same rows in any world, and weigh what counts."""

import pytest
import torch

import chats
from zeroshard.data.batches import EvalBatches, RowBatches, require_rows
from zeroshard.data.examples.row_plan import rows_of_length
from zeroshard.data.examples.store import Examples
from zeroshard.data.prepare import prepare
from zeroshard.data.spec import DataSpec
from zeroshard.host.errors import UserError


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    path = chats.write_rows(folder / "rows.jsonl", chats.pairs(40))
    spec = DataSpec("text", (str(path),), format="prompt")
    return rows_of_length(Examples(prepare(spec, folder / "out"), "train"), 16, split="train")


@pytest.mark.parametrize(("micro", "accumulate", "world"), [(4, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1)])
def test_a_step_has_the_same_rows_and_weights_in_any_world(rows, micro, accumulate, world):
    whole = RowBatches(rows, 4)
    for step in (0, 3, 11):
        parts = [
            (batches(step, m), batches.weight(step, m))
            for m in range(accumulate)
            for batches in (RowBatches(rows, micro, accumulate, rank, world) for rank in range(world))
        ]
        tokens, targets = whole(step, 0)
        assert torch.equal(torch.cat([part[0][0] for part in parts]), tokens)
        assert torch.equal(torch.cat([part[0][1] for part in parts]), targets)
        num_targets = int((targets != -100).sum())
        for (_, own), weight in parts:
            assert weight == pytest.approx(int((own != -100).sum()) * len(parts) / num_targets)
        assert whole.weight(step, 0) == 1.0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_evaluation_weighs_its_batches_by_what_counts(rows, world):
    each = [EvalBatches(rows, 2, 7, rank, world) for rank in range(world)]
    assert len({len(one) for one in each}) == 1
    total = sum(weight for one in each for *_, weight in one)
    assert total == each[0].num_targets
    for one in each:
        for _, targets, weight in one:
            assert weight in (0, int((targets != -100).sum()))


def test_too_few_rows_are_refused(rows):
    with pytest.raises(UserError, match="but one batch needs 1,000"):
        require_rows(rows, 1000)
