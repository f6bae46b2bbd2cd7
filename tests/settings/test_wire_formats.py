"""What travels between ranks, as data."""

import torch

from zeroshard.settings.local_steps import LocalStepsConfig
from zeroshard.settings.wire import WireConfig
from zeroshard.settings.wire_formats import BlockFormat
from zeroshard.zero import LocalSteps, MixedPrecision


def test_fp8_is_another_name_of_e4m3():
    e4m3 = BlockFormat("e4m3", 64)
    assert BlockFormat("fp8", 64) == e4m3
    precision = MixedPrecision(gather="fp8", reduce="fp8", block=64)
    assert precision.weights_format(torch.float32) == precision.gradients_format(torch.float32) == e4m3
    assert LocalSteps(every=4, wire="fp8", block=64).form == e4m3
    from_config = MixedPrecision(**WireConfig(weights="fp8", grads="fp8", block=64).as_precision({}))
    assert from_config.weights_format(torch.float32) == e4m3
    assert LocalStepsConfig(every=4, wire="fp8").wire == "fp8"
