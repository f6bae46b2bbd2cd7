"""An engine of the core's plain parts, and optimizers over its pieces: as `Zero` makes them, by the core alone."""

from zeroshard.zero.core.engine import Engine, Parts
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.layout import ALIGNMENT, FlatLayout
from zeroshard.zero.core.optimizer import PieceOptimizer
from zeroshard.zero.core.passes import Passes
from zeroshard.zero.core.precision import Precision
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import resolve_strategy
from zeroshard.zero.core.units import Group, groups_of, partition
from zeroshard.zero.core.weights import PlainTransport, Weights


def plain_engine(model, stage=3, units=(), comm=None, precision=None, *, prefetch=1):
    strategy, policy, ranks = resolve_strategy(stage), precision or Precision(), RankGroups.of(comm)

    def group(name, params):
        comm, dtype, device = ranks.shard_group, params[0][1].dtype, params[0][1].device  # before they are moved
        layout = FlatLayout.of([(each, param.shape) for each, param in params], comm.world_size, ALIGNMENT)
        weights = Weights(name, params, layout, strategy, ranks, policy, PlainTransport(comm, layout))
        dtypes = policy.reduced_dtype(dtype), policy.gradient_dtype(dtype)
        return Group(weights, Gradients(name, layout, strategy, ranks, device, *dtypes))

    parts = Parts(
        specs=partition(model, units),
        groups=lambda spec: groups_of(spec.name, spec.params, group),
        passes=lambda root, others: Passes(root, others, ranks, strategy, prefetch),
        world=comm,
        named_state=lambda model: model.state_dict(keep_vars=True),
        cast=policy.param_dtype if policy.cast_forward_inputs else None,
    )
    return Engine.of(model, parts)


class PlainOptimizer(PieceOptimizer):
    """[Note: One step] in `optimizer`, by torch's own hooks."""

    def __init__(self, engine, cls, params=None, **settings):
        groups = engine.passes.groups()
        homes = {param: (group, slot) for group in groups for slot, param in enumerate(group.params.params)}
        super().__init__(cls, engine.model.parameters() if params is None else params, homes, **settings)
        self.optimizer.register_step_pre_hook(lambda *_: self.before_step())
        self.optimizer.register_step_post_hook(lambda *_: self.after_step())

    def step(self):
        self.optimizer.step()
