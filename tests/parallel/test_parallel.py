import pytest

from zeroshard.host.errors import UserError
from zeroshard.parallel import STRATEGIES, build_strategy


def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UserError, match=r"strategy: there is no 'zero9'; choose one of zero0, .*, zero1-torch, fsdp2"):
        build_strategy("zero9", None)
    assert list(STRATEGIES) == ["zero0", "zero1", "zero2", "zero3", "ddp", "zero1-torch", "fsdp2"]
