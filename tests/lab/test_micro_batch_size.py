from zeroshard.lab.planner.micro_batch_size import largest_micro_batch
from zeroshard.lab.planner.planner import planner_for
from zeroshard.train.config.config import TrainConfig

MIB = 2**20
SMALL = {"nproc": 4, "seq_len": 64, "device": "cpu", "model": {"name": "gpt2-demo", "n_layer": 2}}
DEEP = {"model": {"name": "gpt2-demo", "n_layer": 8}, "seq_len": 16}


def predicted(num_bytes, **kwargs):
    return largest_micro_batch(TrainConfig.model_validate({**SMALL, **kwargs}), num_bytes)


def test_what_a_stage_saves_makes_room_for_sequences():
    by_stage = [predicted(40 * MIB, strategy=f"zero{stage}", **DEEP) for stage in range(4)]
    # Stages 1 and 2 both hold no gradient between steps, and one whole unit's and a shard at the fullest moment.
    assert 1 <= by_stage[0] < by_stage[1] <= by_stage[2] < by_stage[3]


def test_where_all_units_are_whole_at_once_stage_three_holds_its_shards_beside_them():
    config = TrainConfig.model_validate(SMALL)  # of two blocks one is used and the other gathered ahead
    planner = planner_for(config.model.name, overrides={"n_layer": 2}, world_size=4, seq_len=64, dtype="float32")
    second, third = (planner.row(stage, 7).step.peak for stage in (2, 3))
    shard_bytes = sum(4 * buffer.layout.shard_numel for buffer in planner.workload.buffers(4))
    assert third.total - second.total == shard_bytes
    assert predicted(11 * MIB, strategy="zero3") < predicted(11 * MIB, strategy="zero2")


def test_more_memory_holds_more_and_too_little_still_tries_one():
    assert predicted(40 * MIB, strategy="zero2") > predicted(12 * MIB, strategy="zero2")
    assert predicted(1000, strategy="zero2") == 1
