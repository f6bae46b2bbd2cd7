"""Settings of `transformers.Trainer` and Accelerate that cannot work with the engine are refused in one line."""

from contextlib import nullcontext
from importlib.util import find_spec

import pytest

from zeroshard.host.errors import UserError

# Imported by the tests and not here: each worker that collects them would take seconds for it.
pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("transformers", "accelerate")
]


@pytest.fixture(autouse=True)
def _own_state():
    """Accelerate keeps its state in the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not PartialState._shared_state


def tiny():
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"torch_compile": True}, "torch_compile"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["mlp"]}, "optim"),
        ({"optim": "lomo"}, "optim"),
    ],
)
def test_the_trainer_refuses_in_one_line(settings, field, tmp_path):
    from transformers import TrainingArguments

    from zeroshard.integrations.transformers import ZeroTrainer

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **settings)
    with pytest.raises(UserError) as told:
        ZeroTrainer(tiny(), args)
    assert told.value.field == field
    assert told.value.todo
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("field", ["fsdp", "deepspeed", "parallelism_config"])
def test_another_way_to_shard_is_refused(field, tmp_path):
    from transformers import TrainingArguments

    from zeroshard.integrations.transformers import ZeroTrainer

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    object.__setattr__(args, field, "given")  # as the packages that each needs would have checked it
    with pytest.raises(UserError, match=rf"^{field}: .*; leave .* out|leave it out"):
        ZeroTrainer(tiny(), args)


@pytest.mark.filterwarnings("ignore:optimizer. KeepsObjects keeps what no checkpoint can hold")
@pytest.mark.parametrize("saves", [True, False])
def test_states_that_no_checkpoint_can_hold_are_refused_before_the_first_step(saves, tmp_path):
    import torch
    from transformers import TrainingArguments

    from zeroshard.integrations.transformers import ZeroTrainer

    class KeepsObjects(torch.optim.SGD):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                self.state[param]["made"] = object()
            return super().step(closure)

    model, rows = tiny(), [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4
    strategy = {"save_strategy": "steps" if saves else "no", "save_steps": 1, "max_steps": 1}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **strategy)
    trainer = ZeroTrainer(model, args, train_dataset=rows, optimizers=(KeepsObjects(model.parameters(), lr=0.1), None))
    told = pytest.raises(UserError, match=r"^optim: KeepsObjects keeps what .*; choose another, or set save_only")
    with told if saves else nullcontext():
        trainer.train()
    assert trainer.state.global_step == (0 if saves else 1)


def test_accelerate_refuses_to_compile_the_whole_model():
    from zeroshard.integrations.accelerate import Accelerator

    with pytest.raises(UserError, match=r"^dynamo_plugin: .*model\.compile\(\)"):
        Accelerator(cpu=True, dynamo_backend="inductor")


def test_a_model_is_prepared_once_and_stays_the_object_that_it_was():
    from zeroshard.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny()
    with pytest.raises(ValueError, match=r"was not prepared; give it to prepare\(\) first"):
        accelerator.engine_of(model)
    assert accelerator.prepare(model) is model
    engine = accelerator.engine_of(model)
    assert accelerator.prepare(model) is model
    assert accelerator.engine_of(model) is engine


def test_ranks_of_which_accelerate_does_not_know_are_refused(monkeypatch):
    """Under srun each of its processes would read all rows."""
    from zeroshard.comm import NullCommunicator
    from zeroshard.integrations.accelerate import Accelerator
    from zeroshard.integrations.plugin import ZeroPlugin
    from zeroshard.zero import Zero

    monkeypatch.setattr(ZeroPlugin, "engine", lambda self, model, precision: Zero(model, comm=NullCommunicator(2)))
    with pytest.raises(UserError, match=r"^accelerate: Accelerate divides data by 1 where 2 ranks train; start with "):
        Accelerator(cpu=True).prepare(tiny())


def test_what_is_ddps_own_is_refused():
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from zeroshard.integrations.accelerate import Accelerator

    compresses = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(UserError, match=r"^comm_hook: fp16 is DDP's, .*; leave it out; ZeroPlugin\("):
        Accelerator(cpu=True, kwargs_handlers=[compresses])
    Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])


def test_a_prepared_model_names_the_way_to_accumulate():
    from zeroshard.integrations.accelerate import Accelerator

    model = Accelerator(cpu=True).prepare(tiny())
    with pytest.raises(UserError, match=r"^model\.no_sync\(\): .*LocalSGD.*; use accelerator\.accumulate\(model\)"):
        model.no_sync()


def test_ddp_around_a_sharded_model_names_the_classes_that_shard_instead(process_group):
    from torch.nn.parallel import DistributedDataParallel

    from zeroshard import Zero

    model = tiny()
    Zero(model)
    with pytest.raises(RuntimeError, match=r"zeroshard\.integrations, and give it ZeroPlugin\(stage="):
        DistributedDataParallel(model)
