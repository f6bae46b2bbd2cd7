import logging
import multiprocessing
import os
import shutil
import stat
import threading
from hashlib import sha256

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeroshard.kernels import adamw8bit, cpu_loops, use_kernels
from zeroshard.kernels.adamw8bit import AdamWOptions, Codes
from zeroshard.kernels.adamw8bit import adamw8bit as update
from zeroshard.optim import AdamW8bit, FlashAdamW

OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
NUMELS = (1, 5, 15, 255, 256, 257, 3 * 4096 + 7, 70_000, 0)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(F32, F32, False), (F32, BF16, False), (BF16, F32, False), (BF16, BF16, False), (BF16, F32, True)]
DTYPES += [(BF16, BF16, True)]


@pytest.fixture(scope="module")
def compiled():
    if cpu_loops.loop(adamw8bit.LOOP) is None:
        pytest.skip("needs a C++ compiler")


def drawn(numels, dtype, grad_dtype, corrected, block, *, seed=0, powers=(-45, 3)):
    """Pieces, gradients of any size with zeros among them, and states after some steps."""
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for numel in numels:
        powers_ = torch.randint(*powers, (numel,), generator=generator)
        grad = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** powers_.double()
        grads.append(torch.where(torch.rand(numel, generator=generator) < 0.3, 0, grad).to(grad_dtype))
    params = [torch.randn(numel, generator=generator).to(dtype) for numel in numels]
    states = []
    for numel in numels:

        def codes(low, numel=numel):
            return torch.randint(low, 128, (numel,), generator=generator, dtype=torch.int8)

        def scales(numel=numel):
            return torch.rand(-(-numel // block), generator=generator).mul_(0.1).add_(1e-30)

        correction = torch.randint(-128, 128, (numel,), generator=generator, dtype=torch.int8)
        states.append(Codes(codes(-127), scales(), codes(-128), scales(), correction if corrected else None))
    return params, grads, states


def updated(how, numels, dtype, grad_dtype, corrected, block, *, device="cpu", **given):
    """Everything that three steps change, on the CPU."""
    params, grads, states = drawn(numels, dtype, grad_dtype, corrected, block, **given)
    params, grads = ([each.to(device) for each in column] for column in (params, grads))
    states = [Codes(*(each if each is None else each.to(device) for each in codes)) for codes in states]
    for step in (1, 2, 3):
        update(params, grads, states, [step] * len(params), OPTIONS, block, how)
    return [each.cpu() for each in (*params, *(each for codes in states for each in codes if each is not None))]


def assert_equal_bits(found, wanted):
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"tensor {number}: {(one != other).nonzero()[:3]}"


@pytest.mark.parametrize("block", [16, 256, 4096])
@pytest.mark.parametrize(("dtype", "grad_dtype", "corrected"), DTYPES)
def test_the_loop_has_the_bits_of_the_reference_on_any_number_of_threads(compiled, dtype, grad_dtype, corrected, block):
    """Odd sizes, shorter last blocks, zeros and denormals."""
    case = (NUMELS, dtype, grad_dtype, corrected, block)
    wanted = updated("reference", *case)
    for num_threads in (1, 2, 3, 4):
        torch.set_num_threads(num_threads)
        assert_equal_bits(updated("auto", *case), wanted)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "corrected", "block"),
    [
        pytest.param(*dtypes, block, marks=[] if (row + column) % 3 == 0 else [pytest.mark.soak])
        for row, dtypes in enumerate([*DTYPES, (F16, F16, False)])
        for column, block in enumerate((16, 256, 4096))
    ],
)
def test_the_kernel_has_the_bits_of_the_reference(dtype, grad_dtype, corrected, block, triton, device):
    case = ((1, 5, 255, 0, 2 * 4096 + 7) if block > 16 else (1, 257), dtype, grad_dtype, corrected, block)
    assert_equal_bits(updated(triton, *case, device=device), updated("reference", *case))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_the_kernel_keeps_what_is_no_number_in_its_block(triton, device):
    params, grads, states = drawn((1024,), F32, F32, False, 256)
    grads[0][300] = float("nan")
    update(params, grads, states, [1], OPTIONS, 256, triton)
    assert params[0].isnan().nonzero().tolist() == [[300]]
    assert [each.isnan().tolist() for each in states[0][1::2]] == [[False, True, False, False]] * 2


@settings(deadline=None, max_examples=60)
@given(
    numel=st.sampled_from([1, 2, 16, 17, 300]),
    low=st.sampled_from([-45, -38, -20, 0, 30]),
    wide=st.sampled_from([1, 8, 70]),
    corrected=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_loop_has_the_bits_of_the_reference_for_gradients_of_any_size(numel, low, wide, corrected, seed):
    dtype = BF16 if corrected else F32
    powers = (low, min(low + wide, 18))
    powers = powers if powers[0] < powers[1] else (low - 15, low - 14)
    case = ((numel,), dtype, dtype, corrected, 16)
    assert_equal_bits(
        updated("auto", *case, seed=seed, powers=powers), updated("reference", *case, seed=seed, powers=powers)
    )


def trained(cls, how="auto", steps=3, dtype=F32, step=lambda optimizer: optimizer.step()):
    """Parameters and states after some steps of an optimizer."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((40, 33), (7,), (300, 5))]
    params.append(nn.Parameter(torch.randn(6, 300).to(dtype).t()))  # not contiguous
    optimizer = cls(params, 0.01)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape).to(dtype)
        params[0].grad = torch.randn(33, 40).t().to(dtype)
        with use_kernels(how):
            step(optimizer)
    return [*params, *(value for param in params for value in optimizer.state[param].values())]


@pytest.mark.redundant(but=["AdamW8bit-dtype1", "FlashAdamW-dtype2"])
@pytest.mark.parametrize(("cls", "dtype"), [(AdamW8bit, F32), (AdamW8bit, F16), (FlashAdamW, BF16)])
def test_an_optimizer_steps_to_the_same_bits_by_loop_and_reference(cls, dtype):
    assert_equal_bits(trained(cls, dtype=dtype), trained(cls, "reference", dtype=dtype))


def test_a_step_inside_of_a_compiled_function_and_on_another_thread_has_the_same_bits(compiled):
    wanted = trained(AdamW8bit)
    torch.compiler.reset()
    compiled_step = torch.compile(lambda optimizer: optimizer.step(), backend="eager")
    assert_equal_bits(trained(AdamW8bit, step=compiled_step), wanted)

    def on_a_thread(optimizer):
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    assert_equal_bits(trained(AdamW8bit, step=on_a_thread), wanted)


def on_two_threads(pieces):
    """Sums of what a step changes; PyTorch's own threads do not survive a fork, so only the loop has two."""
    params, grads, states = pieces
    torch.set_num_threads(2)
    update(params, grads, states, [1], OPTIONS, 256)
    torch.set_num_threads(1)
    return [float(each.double().sum()) for each in (*params, *states[0][:4])]


def test_a_forked_process_updates_on_several_threads_as_its_parent_has(compiled):
    """The threads of a call end with it, so a fork loses none."""
    case = ((300_000,), F32, F32, False, 256)
    wanted, again = on_two_threads(drawn(*case)), drawn(*case)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: there.send(on_two_threads(again)))
    child.start()
    assert here.poll(60)
    assert here.recv() == wanted
    child.join()


def test_graphs_of_before_an_update_are_outdated_and_tensors_without_memory_take_the_reference(compiled):
    weight = nn.Parameter(torch.ones(300))
    loss = (weight * weight).sum()
    optimizer = AdamW8bit([weight])
    weight.grad = torch.ones(300)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.device("meta"):
        nothing = nn.Parameter(torch.ones(300))
        nothing.grad = torch.ones(300)
    AdamW8bit([nothing]).step()


@pytest.mark.redundant(but=["no compiler", "bad compiler"])
@pytest.mark.parametrize("trouble", ["no compiler", "bad compiler", "no folder"])
def test_without_a_compiler_or_a_folder_one_line_says_what_happens(trouble, monkeypatch, caplog, tmp_path):
    cpu_loops.loop.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false" if trouble == "bad compiler" else "")
    if trouble == "no compiler":
        monkeypatch.setattr(cpu_loops.shutil, "which", lambda name: None)
    if trouble == "no folder":
        (tmp_path / "zeroshard").write_text("a file")
    try:
        with caplog.at_level(logging.WARNING, "zeroshard.kernels"):
            found = trained(AdamW8bit)
            assert_equal_bits(found, trained(AdamW8bit, "reference"))
    finally:
        cpu_loops.loop.cache_clear()
    if trouble == "no folder" and not caplog.records:
        return  # compiled in a temporary one
    (record,) = caplog.records
    assert record.message.startswith("kernels: adamw8bit runs by PyTorch's own operations, many times slower: ")
    assert "\n" not in record.message


def changed(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.unlink()  # what is loaded may not change
    path.write_bytes(content)
    path.chmod(0o600)


def flip(content):
    content[len(content) // 2] ^= 1


UNTRUSTED = {
    "cut": lambda path: changed(path, lambda content: content.__delitem__(slice(len(content) // 2, None))),
    "one bit": lambda path: changed(path, flip),
    "others may write to it": lambda path: path.chmod(0o620),
    "a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".elsewhere"))),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.fixture
def num_compiled(compiled, monkeypatch, tmp_path):
    """Loads the loop as a new process would; returns how often it was compiled so far, which is a copy here: fast."""
    made, commands = cpu_loops.loop(adamw8bit.LOOP)._name, []

    def compiles(command, **_):
        commands.append(command)
        shutil.copyfile(made, command[-1])

    def loads():
        cpu_loops.loop.cache_clear()
        assert cpu_loops.loop(adamw8bit.LOOP) is not None
        return len(commands)

    monkeypatch.setattr(cpu_loops.subprocess, "run", compiles)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield loads
    cpu_loops.loop.cache_clear()


@pytest.mark.parametrize("how", UNTRUSTED)
def test_a_library_that_is_not_to_be_trusted_is_made_anew(how, num_compiled, tmp_path):
    assert (num_compiled(), num_compiled()) == (1, 1)
    (path,) = tmp_path.rglob("*.so")
    UNTRUSTED[how](path)
    assert (num_compiled(), num_compiled()) == (2, 2)
    assert sha256(path.read_bytes()).hexdigest() == path.stem.rpartition("-")[2]
    assert path.lstat().st_mode == stat.S_IFREG | 0o600


@pytest.mark.parametrize("why", ["belongs to user", "may be written by other users"])
def test_a_folder_that_others_may_write_to_is_not_used(why, num_compiled, monkeypatch, caplog, tmp_path):
    num_compiled()
    folder, owners = tmp_path / "zeroshard", [os.geteuid() + 1]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    if why == "belongs to user":  # asked first for the folder
        monkeypatch.setattr(cpu_loops.os, "geteuid", lambda: owners.pop() if owners else os.getuid())
    else:
        folder.chmod(0o770)
    assert num_compiled() == 2
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (record,) = caplog.records
    assert f"kernels: loops are compiled in each process: {folder} {why}" in record.message


@pytest.mark.parametrize(
    "wrong",
    [
        lambda codes: codes._replace(m_scales=codes.m_scales.double()),
        lambda codes: codes._replace(r_scales=codes.r_scales[:1]),
        lambda codes: codes._replace(r=codes.r.float()),
        lambda codes: codes._replace(m=codes.m[:-1]),
        lambda codes: codes._replace(m=codes.m.repeat(2)[::2]),
        lambda codes: codes._replace(r=codes.r.to("meta")),
        lambda codes: codes._replace(correction=codes.m),
    ],
)
@pytest.mark.parametrize("how", ["auto", "reference"])
def test_states_that_are_not_those_of_their_piece_are_refused(wrong, how):
    """Addresses alone would not tell: what lies behind them would be written to."""
    params, grads, states = drawn((600,), F32, F32, False, 256)
    with pytest.raises(ValueError, match=r"^states: of 600 elements in blocks of 256 there must be as many int8 codes"):
        update(params, grads, [wrong(states[0])], [1], OPTIONS, 256, how)
