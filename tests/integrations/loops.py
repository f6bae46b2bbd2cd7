"""What the tests of the integrations ask about, run once: ``python loops.py OUT`` writes ``OUT/results.pt``.

transformers is imported in one process, which forks the ranks: one for the runs that nothing shards, then two.
"""

import importlib.util
import json
import os
import pickle
import socket
import sys
import traceback
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_ranks(world_size, run, out):
    """``run(out)`` in so many ranks, forked from this process; the results of each, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world_size):
        path = out / f"{run.__name__}-{rank}.pickle"
        child = os.fork()
        if child == 0:
            os._exit(_rank(rank, world_size, port, run, out, path))
        children.append((child, path))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    if any(codes):
        sys.exit(1)
    return [pickle.loads(path.read_bytes()) for _, path in children]


def _rank(rank, world_size, port, run, out, path):
    from zeroshard.host.launch.process_group import shutdown

    torch.set_num_threads(1)
    if world_size > 1:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in told.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    try:
        path.write_bytes(pickle.dumps(run(out)))
        if world_size > 1:
            shutdown()
    except BaseException:  # noqa: BLE001 -- it is told to the test
        traceback.print_exc()
        return 1
    return 0


def _numbers(trainer):
    """What the trainer logged of its steps and evaluations."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def _weights(trainer):
    engine = getattr(trainer, "engine", None)
    return dict(trainer.model.state_dict() if engine is None else engine.state_dict())


def plain(out):
    """Nothing is sharded, in one process."""
    from accelerate import Accelerator
    from transformers import Trainer

    example, found = _example("transformers_trainer"), {}
    trainer = example.trainer(Trainer, str(out / "plain"))
    trainer.train()
    found["trainer"] = {"log": _numbers(trainer), "weights": _weights(trainer)}
    found["own optimizer"] = _numbers(_with_own_optimizer(example, Trainer, out / "plain-sgd"))
    found["best"] = _best_at_end(example, Trainer, out / "plain-best")

    example = _example("accelerate_loop")
    model, losses = example.train(Accelerator(**example.SETTINGS), str(out / "plain-state"))
    found["accelerate"] = {"losses": losses, "weights": dict(model.state_dict())}
    found["generated"] = [_generated(model.eval(), row) for row in (0, 1)]
    return found


def _generated(model, row, **kwargs):
    prompt = torch.tensor([[3, 1 + 40 * row, 4]])
    # Ranks end at different tokens.
    return model.generate(prompt, max_new_tokens=4 + 6 * row, do_sample=False, pad_token_id=0, **kwargs).tolist()


def _with_own_optimizer(example, kind, out):
    """Made by the user over the model's parameters, beside recomputation."""
    settings = {"save_strategy": "no", "max_steps": 2, "gradient_checkpointing": True}
    trainer = example.trainer(kind, str(out), settings=settings)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    trainer.train()
    return trainer


def _best_at_end(example, kind, out):
    """The model learns nothing of other random tokens: its first evaluation is the best."""
    settings = {"load_best_model_at_end": True, "save_only_model": True, "save_total_limit": 1}
    trainer = example.trainer(kind, str(out), settings=settings)
    trainer.train()
    return {"log": _numbers(trainer), "weights": _weights(trainer), "evaluated": trainer.evaluate()["eval_loss"]}


def sharded(out):
    """Two ranks."""
    from transformers import AutoModelForCausalLM

    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.integrations.transformers import ZeroTrainer
    from zeroshard.zero import Offload

    example, found = _example("transformers_trainer"), {}
    folder = out / "zero"
    trainer = example.trainer(ZeroTrainer, str(folder), zero_plugin=ZeroPlugin(stage=3))
    found["evaluated first"] = trainer.evaluate()["eval_loss"]
    trainer.state.log_history.clear()
    trainer.train()
    weights = _weights(trainer)
    engine = trainer.engine
    found["trainer"] = {"log": _numbers(trainer), "weights": weights}
    found["memory"] = engine.memory_bytes()
    trainer.save_model(str(out / "saved"))
    torch.distributed.barrier()
    opened = AutoModelForCausalLM.from_pretrained(out / "saved").state_dict()
    found["opened"] = all(torch.equal(value, weights[name]) for name, value in opened.items())
    found["files"] = sorted(path.name for path in (folder / "checkpoint-4").iterdir())

    away = ZeroPlugin(stage=3, offload=Offload(weights="host"))
    for name, plugin in {"at 3": ZeroPlugin(stage=3), "at 1": ZeroPlugin(stage=1), "with state away": away}.items():
        again = example.trainer(ZeroTrainer, str(folder), zero_plugin=plugin)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        memory = again.engine.memory_bytes()
        found[f"resumed {name}"] = {"log": _numbers(again), "weights": _weights(again), "memory": memory}
    # out/plain was written by transformers' own Trainer in one process.
    again = example.trainer(ZeroTrainer, str(out / "moved"), zero_plugin=ZeroPlugin(stage=2))
    again.train(resume_from_checkpoint=str(out / "plain" / "checkpoint-2"))
    found["from plain"] = _numbers(again)

    found["own optimizer"] = _numbers(_with_own_optimizer(example, ZeroTrainer, out / "sgd"))
    found["best"] = _best_at_end(example, ZeroTrainer, out / "best")
    found["bf16"] = _in_bf16(example, ZeroTrainer, out / "bf16")
    found["accelerate"] = accelerated(out)
    return found


def _in_bf16(example, kind, out):
    settings = {"bf16": True, "max_steps": 2, "save_strategy": "no"}
    trainer = example.trainer(kind, str(out), settings=settings)
    trainer.train()
    dtypes = {str(group.params.full.dtype) for group in trainer.engine._runtime.groups()}
    return {"log": _numbers(trainer), "computes": dtypes, "saved": {str(v.dtype) for v in _weights(trainer).values()}}


def accelerated(out):
    """The same ranks, by Accelerate's loop."""
    from accelerate.state import AcceleratorState, GradientState

    from zeroshard.integrations.accelerate import Accelerator
    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.zero import Offload

    AcceleratorState._reset_state()
    GradientState._reset_state()
    example, found = _example("accelerate_loop"), {}
    accelerator = Accelerator(**example.SETTINGS)
    rank = accelerator.process_index
    model, losses = example.train(accelerator, str(out / "state"))
    state = dict(accelerator.get_state_dict(model))
    found["first"] = {"losses": losses, "weights": state}
    found["generated"] = _generated(model.eval(), rank)
    with accelerator.engine_of(model).full_params():
        found["unsharded"] = _generated(model, rank)
    model.train()
    found["clipped"] = _clip_value(accelerator, model, example)

    away = ZeroPlugin(stage=3, offload=Offload())
    for name, plugin in {"resumed": ZeroPlugin(stage=2), "resumed with state away": away}.items():
        other = Accelerator(zero_plugin=plugin, **example.SETTINGS)
        again, losses = example.train(other, str(out / "state"), first_epoch=1)
        found[name] = {"losses": losses, "weights": dict(other.get_state_dict(again))}
    found["written"] = sorted(path.name for path in (out / "state" / "epoch-1").iterdir())
    return found


def _clip_value(accelerator, model, example):
    batch = {name: value[None] for name, value in example.rows(2)[accelerator.process_index].items()}
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_value_(model.parameters(), 1e-4)
    return max(param.grad.abs().max().item() for param in model.parameters())


def main(out):
    import transformers.trainer  # noqa: F401 -- before the ranks are forked
    from transformers import LlamaForCausalLM  # noqa: F401

    import zeroshard.integrations.transformers  # noqa: F401

    results = {"plain": in_ranks(1, plain, out)[0], "ranks": in_ranks(2, sharded, out)}
    torch.save(results, out / "results.pt")
    print(json.dumps(sorted(results)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
