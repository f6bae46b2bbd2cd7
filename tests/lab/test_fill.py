from zeroshard.lab.fill import largest_micro_batch
from zeroshard.train.config import TrainConfig

MIB = 2**20


def predicted(num_bytes, **kwargs):
    config = {"nproc": 4, "seq_len": 64, "device": "cpu", "model": {"name": "gpt2-demo", "n_layer": 2}, **kwargs}
    return largest_micro_batch(TrainConfig.model_validate(config), num_bytes)


def test_what_a_stage_saves_makes_room_for_sequences():
    by_stage = [predicted(12 * MIB, strategy=f"zero{stage}") for stage in range(4)]
    assert 1 <= by_stage[0] < min(by_stage[1:])  # what stage 3 saves beyond stage 2, its gathered units may take


def test_more_memory_holds_more_and_too_little_still_tries_one():
    assert predicted(40 * MIB, strategy="zero2") > predicted(12 * MIB, strategy="zero2")
    assert predicted(1000, strategy="zero2") == 1
