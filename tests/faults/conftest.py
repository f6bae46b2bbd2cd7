import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are slower on several threads, which spin while they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
