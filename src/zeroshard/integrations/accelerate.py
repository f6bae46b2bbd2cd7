"""`Accelerator`: Hugging Face Accelerate's, but ``prepare`` shards a model and its optimizer with `zeroshard.Zero`.

A loop written for Accelerate changes one line, the import. ``prepare`` returns the model itself, not a wrapper: its
parameters keep their names and identity, and the engine takes over an optimizer that was made before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, broadcast_object_list
except ModuleNotFoundError as error:
    raise ImportError(f"{__name__}: {error.name} is not installed; pip install 'zeroshard[accelerate]'") from None

from zeroshard.checkpoint import load, save
from zeroshard.host.errors import UserError
from zeroshard.integrations.plugin import ZeroPlugin, engine_of
from zeroshard.zero import Zero
from zeroshard.zero.optimizers.adoption import take_over

SHARDS = "zero"  # the folder of the engine's checkpoint inside a checkpoint of Accelerate or the Trainer
_OURS = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` with `Zero` in place of DDP.

    ``prepare``, ``backward``, ``accumulate``, ``no_sync``, ``clip_grad_norm_``, ``save_state``, ``load_state`` and
    ``get_state_dict`` work as in Accelerate. ``save_state`` writes one sharded checkpoint for each model, which can be
    loaded at any stage and on any number of ranks.

    Args:
        zero_plugin: how to shard; None: stage 3.
        **kwargs: arguments of `accelerate.Accelerator`.

    Raises:
        UserError: DeepSpeed, FSDP, another parallelism or a dynamo plugin is asked for too.
    """

    zero_plugin: ZeroPlugin

    saves_states = False  # whether the states of optimizers will be saved, so that those that cannot be are refused

    def __init__(self, *, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.zero_plugin = zero_plugin or ZeroPlugin()
        self._require_alone()

    @classmethod
    def in_place_of(cls, accelerator: accelerate.Accelerator, zero_plugin: ZeroPlugin) -> Accelerator:
        """Change an `accelerate.Accelerator` that has prepared nothing into this class; references to it stay valid.

        Raises:
            UserError: as the constructor.
        """
        accelerator.__class__ = cls
        assert isinstance(accelerator, Accelerator)
        accelerator.zero_plugin = zero_plugin
        accelerator._require_alone()
        return accelerator

    def _require_alone(self) -> None:
        if self.distributed_type not in _OURS:
            name = str(self.distributed_type).rpartition(".")[2]
            todo = "leave it out of `accelerate config`; ZeroPlugin(stage=...) says how Zero shards"
            raise UserError("accelerate", f"distributed_type {name} shards too", todo)
        hook = str(getattr(getattr(self, "ddp_handler", None), "comm_hook", "no")).rpartition(".")[2].lower()
        if hook != "no":
            todo = "leave it out; ZeroPlugin(precision=MixedPrecision(...)) says what is sent"
            raise UserError("comm_hook", f"{hook} is DDP's, and Zero reduces gradients itself", todo)
        if getattr(self, "parallelism_config", None) is not None:
            raise UserError("parallelism_config", "Zero is data-parallel alone", "leave it out")
        if str(getattr(self.state.dynamo_plugin, "backend", "NO")).rpartition(".")[2] != "NO":
            todo = "leave it out and compile the model in place before prepare: `model.compile()`"
            raise UserError("dynamo_plugin", "a compiled model hides its blocks from Zero", todo)

    # -- prepare ----------------------------------------------------------------------------------------------

    def engine_of(self, model: nn.Module) -> Zero:
        """The engine of a prepared model.

        Raises:
            ValueError: the model was not prepared.
        """
        found = engine_of(model)
        if found is None:
            raise ValueError(f"engine_of: {type(model).__name__} was not prepared; give it to prepare() first")
        return found

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate; the engines take over optimizers among ``args``, so that these can be saved and loaded."""
        found = super().prepare(*args, **kwargs)
        for each in found if isinstance(found, tuple) else (found,):
            if isinstance(each, AcceleratedOptimizer):
                take_over(each.optimizer, may_move=True)
        for unsaved in (line for engine in self._engines() for line in engine.unsaved_states() if self.saves_states):
            raise UserError("optim", unsaved, "choose another, or set save_only_model=True")
        return found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Move the model to its device and make its engine. Collective."""
        if engine_of(model) is not None:
            if not any(each is model for each in self._models):
                self._models.append(model)
            return model
        model = super().prepare_model(model, device_placement, evaluation_mode=True)  # no DDP
        num_ranks = self.zero_plugin.engine(model, self.mixed_precision).comm.world_size
        if num_ranks != self.num_processes:  # srun's variables are none that Accelerate reads
            what = f"Accelerate divides data by {self.num_processes} where {num_ranks} ranks train"
            raise UserError("accelerate", what, "start with torchrun or `accelerate launch`")
        if not hasattr(model, "no_sync"):
            vars(model)["no_sync"] = _refuse_no_sync
        return model

    # -- the training step ------------------------------------------------------------------------------------

    _loss_factor: Callable[[], float] | None = None

    @contextmanager
    def loss_times(self, factor: Callable[[], float]) -> Generator[None]:
        """In this block ``backward`` is that of the loss times ``factor()``."""
        self._loss_factor = factor
        try:
            yield
        finally:
            self._loss_factor = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As in Accelerate."""
        super().backward(loss if self._loss_factor is None else loss * self._loss_factor(), **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Wrap a micro-batch that no step follows: its gradients accumulate as the engine's ``accumulate`` says."""
        engine = engine_of(model)
        if engine is None:
            with super().no_sync(model):
                yield
        else:
            with engine.micro_batch(last=False):
                yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients; returns their norm over all ranks and shards before clipping.

        If ``parameters`` are all of a model's, the norm is bit-identical at every stage.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in self._models:
            engine = engine_of(model)
            trained, theirs = ({id(p) for p in each if p.requires_grad} for each in (given, model.parameters()))
            if engine is not None and trained == theirs:
                self.unscale_gradients()
                return engine.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(given, max_norm, norm_type)

    # -- state ------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The unsharded state on the CPU, in the dtype of the master weights. Collective."""
        engine = engine_of(model)
        return super().get_state_dict(model, unwrap) if engine is None else engine.state_dict()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, but models and optimizers with an engine are saved as sharded checkpoints. Collective."""
        engines = self._engines()
        with self._noted(self.register_save_state_pre_hook) as kept, self._without_ours():
            found = super().save_state(output_dir, *args, **kwargs)
        folder = Path(of_first_rank(kept[0]))
        for index, engine in enumerate(engines):
            save(folder / _name(index), engine, step=self.step)
        return found

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load what `save_state` wrote, even at another stage or on another number of ranks. Collective.

        Raises:
            UserError: a checkpoint is missing or damaged.
        """
        engines = self._engines()
        with self._noted(self.register_load_state_pre_hook) as kept, self._without_ours():
            found = super().load_state(input_dir, *args, **kwargs)
        folder = Path(of_first_rank(kept[0]))
        for index, engine in enumerate(engines):
            load(folder / _name(index), engine)
        return found

    @contextmanager
    def _noted(self, register: Callable[..., Any]) -> Generator[list[str]]:
        """In this block, note the folder that Accelerate tells the hooks of ``register``."""
        kept: list[str] = []
        hook = register(lambda *given: kept.append(given[-1]))
        try:
            yield kept
        finally:
            hook.remove()

    def _engines(self) -> list[Zero]:
        return [engine for model in self._models if (engine := engine_of(model)) is not None]

    @contextmanager
    def _without_ours(self) -> Generator[None]:
        """Hide models and optimizers that have an engine from Accelerate, which would save them unsharded itself."""
        models, optimizers = self._models, self._optimizers
        ours = {id(param) for engine in self._engines() for param in engine.model.parameters()}
        self._models = [model for model in models if engine_of(model) is None]
        self._optimizers = [
            each
            for each in optimizers
            if ours.isdisjoint(id(p) for group in each.param_groups for p in group["params"])
        ]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def _refuse_no_sync() -> NoReturn:
    todo = "use accelerator.accumulate(model) or accelerator.no_sync(model)"
    raise UserError("model.no_sync()", "a prepared model is no DDP, and takes no local steps (LocalSGD)", todo)


def of_first_rank(folder: str) -> str:
    """Return rank 0's ``folder``: the shards of all ranks belong into one, whatever each rank was given. Collective."""
    return broadcast_object_list([folder])[0]


def _name(index: int) -> str:
    return SHARDS if index == 0 else f"{SHARDS}_{index}"
