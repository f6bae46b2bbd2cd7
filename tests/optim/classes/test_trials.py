import random
import threading

import torch

from zeroshard.optim.classes.trials import isolated, seed_generators


def test_threads_borrow_the_generators_one_after_the_other():
    """Each draws what its seed says, whatever the others do, and afterwards all generators are where they were."""
    before = torch.get_rng_state(), random.getstate()
    drawn = {}

    def borrow(seed):
        for _ in range(50):
            with isolated():
                seed_generators(seed)
                drawn.setdefault(seed, set()).add((torch.rand(3).sum().item(), random.random()))

    threads = [threading.Thread(target=borrow, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: len(values) for seed, values in drawn.items()} == dict.fromkeys(range(4), 1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
