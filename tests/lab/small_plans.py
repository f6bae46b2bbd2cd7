"""A GPU of a few megabytes and a model for it, which plans in tests are made of."""

from zeroshard.lab.predict.hardware import Device

SMALL = {"n_layer": 6, "n_head": 4, "n_embd": 64, "vocab_size": 512, "seq_len": 64}


def small_gpu(memory_bytes, **changes):
    rates = {"float32": 1e12, "bfloat16": 4e12}
    link = {"matmul_share": 1.0, "link": "pcie4", **changes}
    return Device("small", memory_bytes, rates, 100e9, "invented", device_type="cpu", **link)
