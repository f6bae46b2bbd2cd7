"""`EngineOptimizers`: the optimizers of an engine, and what the engine does around their steps.

An optimizer is given pieces of parameters and knows nothing of ranks. Whatever concerns several ranks or buffers is
here: what no step may change; weights that a step leaves stale; the layout for an optimizer that needs whole tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.every_rank import call_of_every_rank
from zeroshard.optim.classes.description import described
from zeroshard.optim.classes.kept_states import CHECKPOINT, KeptStates
from zeroshard.optim.named_shards import NamedShard, ShardReader, restore_settings
from zeroshard.zero.core.layout import WHOLE
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.optimizers.methods import install_methods
from zeroshard.zero.optimizers.observer import Observer
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.optimizers.sharded_params import ShardedParams
from zeroshard.zero.optimizers.state_dict import Stateful, cut_states
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.state import relayout, training_state
from zeroshard.zero.state.full_state import take_names

MOSTLY_PADDING = 8  # a buffer this many times as large as its parameters costs more than a node's ranks save


class EngineOptimizers:
    """The optimizers of one engine; each of them tells it of its steps.

    Attributes:
        missed: the parameters whose states in the loaded checkpoint were dropped, because they had no optimizer yet.
        unsaved: what of the states of the optimizers a checkpoint cannot hold, as far as trials have shown it.
        observers: what is attached to the engine.
        piecewise: the optimizers with their parameters and pieces, in the order in which they were made.
        require_same_model: raises if the model has other parameters than the engine was built with.
    """

    def __init__(self, runtime: Runtime, rank_groups: RankGroups) -> None:
        self._runtime, self._rank_groups = runtime, rank_groups
        self.observers: list[Observer] = []
        self._params = ShardedParams(runtime.groups())
        self.piecewise: list[PiecewiseOptimizer] = []
        self.missed: set[nn.Parameter] = set()
        self.unsaved: list[str] = []
        self.require_same_model: Callable[[], None] = lambda: None

    # -- what the engine asks ---------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order in which they were made."""
        return [known.optimizer for known in self.piecewise]

    def optimizer(
        self, optimizer_cls: type[Optimizer], params: Iterable[Any], kwargs: dict[str, Any], state_format: str
    ) -> Optimizer:
        """See `Zero.optimizer`."""
        if state_format == "fp32":
            piecewise = PiecewiseOptimizer(optimizer_cls, params, kwargs, self._params, self)
        else:
            from zeroshard.zero.state_formats.operands import attach, format_of  # late: for kernels

            form = format_of(optimizer_cls, state_format)
            piecewise = PiecewiseOptimizer(optimizer_cls, params, kwargs, self._params, self, form)
            if form is not None:
                attach(piecewise, form)
        self._know(piecewise, states_are_cut=True)
        return piecewise.optimizer

    def adopt(self, optimizer: Optimizer, *, may_move: bool = False) -> None:
        """See `zeroshard.zero.optimizers.adoption`.

        Raises:
            ValueError: a class that cannot be sharded, or whose settings do not tell how it was built; parameters that
                another optimizer has; states that are narrower than the master weights.
            RuntimeError: it needs whole tensors, and they are cut into pieces that may not move, or cannot.
        """
        piecewise = PiecewiseOptimizer.adopted(optimizer, self._params, self, may_move=may_move)
        self._know(piecewise, states_are_cut=False)
        piecewise.hold_pieces()

    def _know(self, piecewise: PiecewiseOptimizer, *, states_are_cut: bool) -> None:
        for observer in self.observers:
            observer.optimizer_comes(piecewise)
        if not states_are_cut:
            cut_states(piecewise)
        install_methods(piecewise)
        self.piecewise.append(piecewise)
        unsaved = _unsaved(piecewise)
        if unsaved:
            self.unsaved.append(f"{type(piecewise.optimizer).__name__} keeps what no checkpoint can hold: {unsaved}")
            warnings.warn(f"optimizer: {self.unsaved[-1]}; a save, restage() and state dicts will refuse", stacklevel=4)
        if not piecewise.has_state and not self.missed.isdisjoint(piecewise.members):
            warnings.warn(
                f"optimizer: the checkpoint that was loaded has states for {type(piecewise.optimizer).__name__}, which "
                "begins without them; make it by zero.optimizer() before the load to continue from them",
                stacklevel=4,
            )

    def settings(self) -> list[str]:
        """Describe every optimizer; ranks must have the same."""
        lines = list[str]()
        for known in self.piecewise:
            lines += described(known.optimizer, map(len, known.by_group), known.is_everywhere)
            lines += [f"states in {'fp32' if known.state_format is None else known.state_format.name}"]
        return lines

    def kept_tensors(self) -> dict[str, Sequence[tuple[str, Tensor]]]:
        """What the observers keep, by category: ``(unit's name, tensor)`` of each."""
        return {observer.category: observer.tensors for observer in self.observers if observer.category}

    def known(self, optimizer: Optimizer | None, what: str) -> PiecewiseOptimizer:
        """Return the entry of ``optimizer`` (None: the only one); ValueError about ``what`` if there is none."""
        found = [known for known in self.piecewise if optimizer is None or known.optimizer is optimizer]
        if len(found) != 1:
            raise ValueError(
                f"{what}: this engine has {len(self.piecewise)} optimizers; name the one that is meant"
                if optimizer is None
                else f"{what}: a {type(optimizer).__name__} that is not this engine's; make it by zero.optimizer()"
            )
        return found[0]

    def require_shardable(self) -> None:
        """Raise ValueError for an optimizer that may update nothing less than all tensors."""
        for known in self.piecewise:
            known.require_shardable()

    def require_weights(self, what: str) -> None:
        """Raise RuntimeError about ``what`` while averages or global weights are in the weights' place."""
        for observer in self.observers:
            observer.require_weights(what)

    def state_holders(self, what: str) -> list[Stateful]:
        """All objects that keep state by shard: the optimizers, and averages; raises as `require_weights` does."""
        self.require_weights(what)
        return [*self.optimizers, *(holder for observer in self.observers for holder in observer.holders())]

    def require_common(self, what: str) -> None:
        """Raise RuntimeError about ``what`` if not all ranks have the same weights."""
        for observer in self.observers:
            observer.require_common(what)

    def resume_at(self, step: int) -> None:
        """See `Zero.resume_at`."""
        for group in self._runtime.groups():
            if (rounding := group.grads.reducer.rounding) is not None:
                rounding.begin_at(step)
        for observer in self.observers:
            observer.resumes_at(step)

    def weights_replaced(self) -> None:
        """Refresh weights after all of them were replaced, by the same values on every rank, and tell the observers."""
        self._runtime.weights.refresh_in_wire_format()
        for known in self.piecewise:
            # Of the class itself: the instance's is replaced by one that changes weights.
            hook = getattr(type(known.optimizer), "weights_replaced", None)
            if hook is not None:
                known.operands.wait()
                hook(known.optimizer)
        for observer in self.observers:
            observer.weights_replaced()

    def named_shards(self, model: nn.Module) -> Iterator[NamedShard]:
        """See `Zero.named_shards`."""
        shards = training_state.named_shards(model, self._runtime, self.state_holders("named_shards"), self.piecewise)
        for observer in self.observers:
            shards = observer.shards(shards)
        yield from shards

    def load_named_shards(self, model: nn.Module, reader: ShardReader) -> None:
        """See `Zero.load_named_shards`."""
        self.require_weights("load_named_shards")
        self._runtime.require_unpinned("load_named_shards")
        own = reader
        for observer in self.observers:
            own = observer.reader(own)
        self.missed = training_state.load_named_shards(model, self._runtime, self.piecewise, own)
        for observer in self.observers:
            observer.load(reader)

    def param_groups(self, model: nn.Module) -> list[tuple[dict[str, Any], list[str]]]:
        """Every optimizer's param groups, each with the names of its parameters that are in the model."""
        take_names(model, self._runtime)
        return [
            (group, [self._params.name(param) for param in self._params.present(chosen)])
            for known in self.piecewise
            for group, chosen in zip(known.optimizer.param_groups, known.by_group, strict=True)
        ]

    def restore_settings(self, model: nn.Module, saved: Sequence[Mapping[str, Any]]) -> None:
        """See `Zero.load_param_groups`."""
        groups = self.param_groups(model)
        facts = [(known.make, params) for known in self.piecewise for params in known.facts()]

        def gained(index: int) -> Mapping[str, Any]:
            make, params = facts[index]
            return KeptStates(make, groups[index][0], None, CHECKPOINT).gained(params[0]) if params else {}

        restore_settings([group for group, _ in groups], [names for _, names in groups], saved, gained)

    def hold_pieces(self) -> None:
        """Give the optimizers their pieces in the current groups; their states are by these pieces already."""
        self._params.locate(self._runtime.groups())
        for known in self.piecewise:
            known.hold_pieces()

    # -- what an optimizer calls -------------------------------------------------------------

    def keep_blocks(self, blocks: Mapping[nn.Parameter, int]) -> None:
        """Lay the parameters out so that each block of so many elements lies on one rank. Collective.

        Raises:
            RuntimeError: gradients wait for a step; another optimizer or an average has state of parameters that would
                move.
        """
        moving = {param for group in relayout.groups_to_leave(self._runtime, blocks) for param in group.params.params}
        affected = [known for known in self.piecewise if not moving.isdisjoint(known.members)]
        for known in affected:
            if known.has_state:
                raise RuntimeError(
                    f"optimizer: whole {'tensors' if WHOLE in blocks.values() else 'blocks'} need a new layout, but "
                    f"{type(known.optimizer).__name__} has state of parameters beside them; make such optimizers and "
                    "their groups before the first step"
                )
        if moving:
            for observer in self.observers:
                observer.layout_changes()
            relayout.keep_blocks(self._runtime, blocks)
            self._runtime.weights.refresh_in_wire_format()
            self._warn_of_padding()
            self._params.locate(self._runtime.groups())
        for known in affected:
            known.take_pieces_anew()

    def _warn_of_padding(self) -> None:
        """Warn if whole tensors on many ranks make buffers that are mostly padding."""
        layouts = [group.params.layout for group in self._runtime.groups() if group.keeps_tensors_whole]
        padded, numel = (sum(getattr(each, name) for each in layouts) for name in ("padded_numel", "numel"))
        if padded > MOSTLY_PADDING * numel:
            world_size = layouts[0].world_size
            warnings.warn(
                f"optimizer: whole tensors over {world_size} ranks make buffers {padded / numel:.0f} times as large as "
                "the parameters in them; give Zero a smaller shard_size, such as the ranks of a node",
                stacklevel=5,
            )

    def before_update(self, members: set[nn.Parameter]) -> None:
        """Refuse a step that would drop gradients, or change averages or global weights instead of the weights."""
        self._runtime.require_reduced("step")
        self._runtime.require_unpinned("step")
        self.require_weights("step")
        self.require_same_model()
        self._runtime.note_writes()
        self._runtime.take_changes(waits=False)
        self._require_own_grads(members)
        for observer in self.observers:
            observer.before_step(members)
        if self._runtime.local_grads is not None:
            self._runtime.local_grads.before_step()

    def _require_own_grads(self, members: set[nn.Parameter]) -> None:
        """Raise RuntimeError if gradients of ``members`` were computed at other weights than a step would change."""
        for group in self._runtime.groups():
            for slot, why in group.grads.unusable.items():
                if group.params.params[slot] in members:
                    raise RuntimeError(f"step: {why}")

    def after_update(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """Expect no backward of earlier forwards any more, and tell the observers."""
        self._runtime.note_step()
        for observer in self.observers:
            observer.after_step(optimizer, members)

    def before_change(self) -> None:
        """Raise RuntimeError inside `full_params`, which promises weights that are current."""
        self._runtime.require_unpinned("optimizer")

    def clear_grads(self, params: set[nn.Parameter] | None, *, set_to_none: bool = True) -> None:
        """Clear the gradients of ``params`` (None: of all), or set them to zero if ``set_to_none`` is False."""
        self._runtime.clear_grads(params, set_to_none=set_to_none)

    def note_call(self, what: str) -> None:
        """Note a call that every rank must make."""
        call_of_every_rank(self._runtime.comm, what)


def _unsaved(piecewise: PiecewiseOptimizer) -> str:
    """Return what a checkpoint cannot hold of the states that steps will make; "" if nothing."""
    if type(piecewise.optimizer).__module__.startswith(("torch.optim.", "zeroshard.")):
        return ""
    for group, params in zip(piecewise.optimizer.param_groups, piecewise.facts(), strict=True):
        kept = KeptStates(piecewise.make, group, None, CHECKPOINT)
        for param in {len(each.shape): each for each in params}.values():
            if unsaved := kept.unsaved(param):
                return unsaved
    return ""
