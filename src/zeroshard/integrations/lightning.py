"""`ZeroStrategy`: with it Lightning's Trainer shards, accumulates, clips, saves and resumes through `zeroshard.Zero`.

    Trainer(strategy=ZeroStrategy(ZeroPlugin(stage=3)), devices=8)

The engine gets a module that wraps the user's, so that ``training_step`` and the like are forwards of the wrapper,
which the engine's hooks see. The engine takes over the optimizers of ``configure_optimizers``. A checkpoint is a folder
instead of a file: ``meta.ckpt`` with Lightning's state of loops, schedulers and callbacks, and ``zero/`` with master
weights and optimizer states in shards, which can be loaded at any stage and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.strategy import _ForwardRedirection
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise ImportError(f"{__name__}: {error.name} is not installed; pip install 'zeroshard[lightning]'") from None

from zeroshard.checkpoint import load, save
from zeroshard.errors import UserError
from zeroshard.integrations.plugin import ZeroPlugin, engine_of
from zeroshard.unit_choice import choose_units
from zeroshard.zero import Zero
from zeroshard.zero.core.strategy import SHARD, resolve_strategy
from zeroshard.zero.optimizers.adoption import take_over

SHARDS, META = "zero", "meta.ckpt"  # names inside a checkpoint's folder
_AROUND = "_zeroshard_around"  # attribute of a module that has an engine: its wrapper `_Wrapper`, the engine's model
_OF_WHOLE_FILES = ("state_dict", "optimizer_states")
_COMPUTES = {"bf16-mixed": "bf16", "32-true": "no", "bf16-true": "no", "64-true": "no"}
_OPTIONS = frozenset(
    {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
        *("process_group_backend", "timeout", "start_method"),
    }
)


class _Wrapper(nn.Module):
    """Wraps the user's module: `ZeroStrategy` calls the wrapper, and the user's methods may call the inner module.

    Names of modules, parameters and buffers are those of the inner module, without a prefix.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the inner module."""
        return self.inner(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `nn.Module.named_modules`, but the inner module has the wrapper's own name."""
        yield prefix, self
        yield from self.inner.named_modules(memo, prefix, remove_duplicate)


def _require_possible(callbacks: Iterable[Callback], *, sharded: bool, rounded: bool) -> None:
    """Raise UserError, before the first step, for callbacks that read or write weights which they would not have."""
    for callback in callbacks:
        name = type(callback).__name__
        averages = isinstance(callback, WeightAveraging | StochasticWeightAveraging)
        todo = "; for an average use strategy.engine.ema()" if averages else ""
        if isinstance(callback, ModelPruning):
            what = f"{name} replaces the parameters, which the engine's buffers hold"
            raise UserError("callbacks", what, "prune before or after the fit, without ZeroStrategy")
        if sharded and averages:
            what = f"{name} reads and writes all weights, and stage 3 shards them"
            raise UserError("callbacks", what, f"use ZeroPlugin(stage=2){todo}")
        if rounded and averages:
            what = f"{name} would average weights in the compute dtype, not the fp32 master weights"
            raise UserError("callbacks", what, f'use precision="32-true"{todo}')


def _require_trained_alone(callbacks: Iterable[Callback], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise UserError if `BaseFinetuning` would compare frozen, sharded weights by value, to see which are new."""
    groups = [group for each in optimizers for group in each.param_groups]
    frozen = any(not param.requires_grad for group in groups for param in group["params"])
    for callback in callbacks:
        if frozen and isinstance(callback, BaseFinetuning):
            what = (
                f"{type(callback).__name__} compares frozen weights of the optimizer by value, and stage 3 shards them"
            )
            todo = "make the optimizer of parameters with requires_grad alone, or use ZeroPlugin(stage=2)"
            raise UserError("callbacks", what, todo)


class ZeroStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` with `Zero` in place of DDP.

    Args:
        zero_plugin: how to shard; None: stage 3.
        **options: options of `DDPStrategy` that are not passed on to DDP: ``process_group_backend``, ``timeout``,
            ``start_method`` and the plugins.

    Raises:
        UserError: an option of DDP itself; in `setup`, a precision of less than 16 bits or of float16, or a callback
            that averages or prunes weights that are sharded or rounded.
    """

    strategy_name = "zero"

    def __init__(self, zero_plugin: ZeroPlugin | None = None, **options: Any) -> None:
        of_ddp = next((name for name in options if name not in _OPTIONS), None)
        if of_ddp is not None:
            raise UserError(of_ddp, "is an option of DDP, which Zero takes the place of", "leave it out")
        super().__init__(**options)
        self.zero_plugin = zero_plugin or ZeroPlugin()
        self._forward_redirection = _ForwardRedirection()
        self._loaded_shards = False

    @property
    def engine(self) -> Zero | None:
        """The engine of the module; None before the Trainer has set it up."""
        around = vars(self.lightning_module).get(_AROUND) if self.lightning_module is not None else None
        return None if around is None else engine_of(around)

    # -- setting up -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """As in Lightning, with the module's engine in place of DDP. Collective."""
        assert self.accelerator is not None
        precision = str(self.precision_plugin.precision)
        if precision not in _COMPUTES:
            raise UserError(
                "precision", f"{precision} computes in float16 or less, which loses gradients", 'use "bf16-mixed"'
            )
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        callbacks = vars(trainer)["callbacks"]
        sharded = resolve_strategy(self.zero_plugin.stage).params is SHARD and self.world_size > 1
        module = self.model
        assert module is not None
        if fits:
            rounded = _COMPUTES[precision] == "bf16" or self.zero_plugin.precision is not None
            _require_possible(callbacks, sharded=sharded, rounded=rounded)
        if fits and self._layer_sync:
            module = self._layer_sync.apply(module)
        self.model = self._around(module, _COMPUTES[precision])
        if fits:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                take_over(optimizer, may_move=True)
            if sharded:
                _require_trained_alone(callbacks, self.optimizers)
        self.setup_precision_plugin()

    def _around(self, module: nn.Module, computes: str) -> nn.Module:
        around = vars(module).get(_AROUND)
        if around is None:
            module = self.precision_plugin.convert_module(module).to(self.root_device)
            around = _Wrapper(module)
            units = choose_units(module, self.zero_plugin.units)
            replace(self.zero_plugin, units=units).engine(around, computes)
            vars(module)[_AROUND] = around
        return around

    # -- the training step ------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``closure`` (forward, backward, clipping), then the step; Lightning runs the closure inside the step."""
        module: Any = model or self.lightning_module
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Wrap a micro-batch that no step follows: its gradients accumulate as the engine's ``accumulate`` says."""
        assert self.engine is not None
        with self.engine.micro_batch(last=False):
            yield

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine loads the checkpoint, so it must be made first."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers: yes from its own file; no from shards, which the engine loads."""
        return not self._loaded_shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: the weights are saved in the shards."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Empty: optimizer states are saved in the shards."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder with Lightning's own state and the engine's shards. Collective."""
        engine = self.engine
        assert engine is not None
        path = Path(self.broadcast(str(filepath)))
        rest = {name: value for name, value in checkpoint.items() if name not in _OF_WHOLE_FILES}
        if self.is_global_zero:
            path.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(rest, path / META, storage_options=storage_options)
        save(path / SHARDS, engine, step=int(checkpoint["global_step"]))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what `save_checkpoint` wrote, at any stage and on any number of ranks, or Lightning's file. Collective.

        Raises:
            UserError: the shards are missing or damaged.
        """
        path = Path(self.broadcast(str(checkpoint_path)))
        self._loaded_shards = path.is_dir()
        if not self._loaded_shards:
            return super().load_checkpoint(path, weights_only)
        assert self.engine is not None
        load(path / SHARDS, self.engine)
        return {**self.checkpoint_io.load_checkpoint(path / META, weights_only=weights_only), "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights from Lightning's own file; weights from shards are loaded already."""
        if not self._loaded_shards:
            assert self.engine is not None
            self.engine.load_state_dict(checkpoint["state_dict"])

    def teardown(self) -> None:
        """As in Lightning, but the model is not moved to the CPU: the engine's buffers hold the weights."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
