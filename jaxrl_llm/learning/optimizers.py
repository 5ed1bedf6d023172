"""The optimisers of `config.optimizer.name`: constructors of optax, each with its settings, and your own."""
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict
from optax import contrib

from jaxrl_llm import parallel
from jaxrl_llm.tools import key_values, registry
from jaxrl_llm.tools.memo import remembered
from jaxrl_llm.tools.registry import Conflict

UNSET = {"b1": -1.0, "b2": -1.0, "momentum": 0.0, "weight_decay": 0.0}  # values of the configuration that all accept
DECAYED = ("all", "matrices")
_KEY = "config.optimizer.name"
_FLAT = ("scale", "bias")  # how the names of norms and biases end
# States of schedules, of optax and of `objectives.scheduled`, and the field that counts their updates.
_COUNTS = {"ScaleByScheduleState": "count", "WeightDecaySchedule": "count", "WrappedScheduleState": "count",
           "Counted": "updates"}


class OptimizerKind(NamedTuple):
    """A constructor `(schedule, **settings) -> optax.GradientTransformation`, and its settings with their defaults."""

    make: Callable[..., optax.GradientTransformation]
    own: dict[str, float]


def without_norms(params: Any) -> Any:
    """Which leaves decay if norms and biases do not."""
    return jax.tree.map_with_path(lambda path, _: not jax.tree_util.keystr(path[-1:]).strip("[]'").endswith(_FLAT), params)


def muon(schedule: optax.Schedule, *, b1: float, b2: float, weight_decay: float, mask: Callable | None = None
         ) -> optax.GradientTransformation:
    """Muon (arXiv 2502.16982) for each matrix of the layers; AdamW, with these b1 and b2, for all other parameters.

    Matrices are `[layers, ..., in, out]`; tables, norms and biases have two axes or fewer. Updates have the root mean square
    of Adam's, so that both share a learning rate.
    """
    def matrices(params):
        numbers = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return jax.tree.map(lambda x: numbers if x.ndim >= 3 else None, params)

    inside = 0.0 if mask else weight_decay
    made = contrib.muon(schedule, weight_decay=inside, adam_b1=b1, adam_b2=b2, adam_weight_decay=inside,
                        muon_weight_dimension_numbers=matrices, consistent_rms=0.2)
    if mask is None:
        return made
    # optax masks the decay of Muon's matrices alone, not of what Adam moves
    return optax.chain(made, optax.add_decayed_weights(lambda count: -weight_decay * schedule(count), mask))


def adafactor(schedule: optax.Schedule, *, weight_decay: float, mask: Callable | None = None) -> optax.GradientTransformation:
    """Adafactor (arXiv 1804.04235); its learning rate is a share of the root mean square of each leaf.

    In optax's own version weight decay is not multiplied by the learning rate; here it is, as in all other optimisers.
    """
    def decay(count):
        return weight_decay * schedule(count)

    return optax.adafactor(schedule, weight_decay_rate=decay if weight_decay else None, weight_decay_mask=mask)


def rmsprop(schedule: optax.Schedule, *, b2: float, eps: float, momentum: float) -> optax.GradientTransformation:
    """RMSProp, whose updates accumulate with `momentum` if it is not 0."""
    return optax.rmsprop(schedule, decay=b2, eps=eps, momentum=momentum or None)


def sgd(schedule: optax.Schedule, *, momentum: float) -> optax.GradientTransformation:
    """The gradient, or its sum that decays with `momentum` if this is not 0."""
    return optax.sgd(schedule, momentum=momentum or None)


TABLE = {
    "adamw": OptimizerKind(optax.adamw, {"b1": 0.9, "b2": 0.999, "weight_decay": 0.0, "eps": 1e-8}),
    "adam": OptimizerKind(optax.adam, {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "lion": OptimizerKind(optax.lion, {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0}),
    "muon": OptimizerKind(muon, {"b1": 0.9, "b2": 0.999, "weight_decay": 0.0}),
    "adafactor": OptimizerKind(adafactor, {"weight_decay": 0.0}),
    "rmsprop": OptimizerKind(rmsprop, {"b2": 0.9, "eps": 1e-8, "momentum": 0.0}),
    "sgd": OptimizerKind(sgd, {"momentum": 0.0}),
}


def settings_of(name: str, **given: float) -> dict[str, float]:
    """The settings of an optimiser: the `given` ones, and its defaults for those left `UNSET`; your own has no such defaults.

    Raises ValueError: unknown names, and settings that the optimiser does not have.
    """
    chosen = {setting: value for setting, value in given.items() if value != UNSET.get(setting)}
    if ":" in name:
        registry.function_of(_KEY, name)
        return chosen
    own = TABLE[registry.one_of(_KEY, name, TABLE)].own
    for setting, value in chosen.items():
        if setting not in own:
            having = [other for other, kind in TABLE.items() if setting in kind.own]
            raise ValueError(f"config.optimizer.{setting} is {value}, but {name} has no {setting}: leave it at "
                             f"{UNSET.get(setting)}, or take one of {', '.join(having)}")
    return own | chosen


def make_optimizer(learning_rate: float, total_updates: int, *, name: str = "adamw", warmup_updates: int = 0,
                   schedule: str = "constant", decayed: str = "all", **settings: float
                   ) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """An optimiser with linear warm-up to `learning_rate`, then `constant`, `linear` or `cosine` (the last two down to 0).

    The update itself clips by global norm, since it needs the norm anyway. Returns the optimiser and its schedule (for the
    log). Of the weights those `decayed` decay: "all", or "matrices", without norms and biases. `settings` are those of
    `settings_of`. Your own "module:function" is called with them and the schedule as `learning_rate`, and returns an
    `optax.GradientTransformation`: any function of optax fits, for example "optax:nadam".
    """
    settings = settings_of(name, **settings)
    rate = schedule_of(learning_rate, total_updates, warmup_updates, schedule)
    masked = {"mask": without_norms} if registry.one_of("config.optimizer.decayed", decayed, DECAYED) == "matrices" else {}
    if masked and not settings.get("weight_decay"):
        raise ValueError(f"config.optimizer.decayed={decayed!r} is about weight decay, and there is none; set "
                         "config.optimizer.weight_decay, or leave it at 'all'")
    if ":" in name:
        if masked:
            raise ValueError(f"config.optimizer.decayed={decayed!r}, and {name} decides by itself what decays; leave it at "
                             "'all'")
        return registry.own(_KEY, name, {"learning_rate": rate, **settings}, optax.GradientTransformation), rate
    return _of_table(name, rate, **settings, **masked), rate


@remembered(16)  # equal settings, one object, with which runs of a process share compiled updates
def _of_table(name: str, schedule: optax.Schedule, **settings: Any) -> optax.GradientTransformation:
    return TABLE[name].make(schedule, **settings)


@remembered(16)
def schedule_of(learning_rate: float, total_updates: int, warmup_updates: int, schedule: str) -> optax.Schedule:
    """The learning rate of each planned update, see `make_optimizer`."""
    rest = max(total_updates - warmup_updates, 1)
    shapes = {"constant": lambda: optax.constant_schedule(learning_rate),
              "linear": lambda: optax.linear_schedule(learning_rate, 0.0, rest),
              "cosine": lambda: optax.cosine_decay_schedule(learning_rate, rest)}
    if schedule not in shapes:
        raise ValueError(f"optimizer.schedule={schedule!r}; allowed: {', '.join(sorted(shapes))}")
    ramp = optax.linear_schedule(0.0, learning_rate, warmup_updates)
    # The first update has count 0: a ramp through (count + 1) avoids wasting it on a rate of zero.
    return optax.join_schedules([lambda count: ramp(count + 1), shapes[schedule]()], [warmup_updates])


def updates_planned(opt_state: Any) -> int | None:
    """Updates so far; None for an optimiser that does not count them, whose learning rate then follows no schedule."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_counts)
    of_schedules = [getattr(node, _COUNTS[type(node).__name__]) for node in nodes if _counts(node)]
    # Moments of an earlier phase of a run have counts of their own, which began before the schedule.
    counts = of_schedules or [count for _, count in optax.tree.get_all_with_path(opt_state, "count")]
    return int(np.max(jax.device_get(counts))) if counts else None


def at_update(tree: Any, number: int) -> Any:
    """A state in which all schedules are at this update, counted from 0.

    Schedules count the updates that are planned: one without a gradient is not made, and must not delay the decay of the rate.
    The other counts, such as that of Adam's bias correction, are of updates that were made.
    """
    def put(node):
        if not _counts(node):
            return node
        name = _COUNTS[type(node).__name__]
        return node._replace(**{name: parallel.put(np.int32(number), getattr(node, name).sharding)})

    return jax.tree.map(put, tree, is_leaf=_counts)


def _counts(node: Any) -> bool:
    """Whether a node of a state is that of a schedule, which counts updates."""
    return type(node).__name__ in _COUNTS


def metrics(o: ConfigDict, opt_state: Any) -> dict[str, jax.Array]:
    """Metrics of the gradients from the state of the optimiser `config.optimizer`: `adam_noise` for Adam, else none."""
    return {"adam_noise": adam_noise(opt_state, o.b1, o.b2)} if o.name in ("adamw", "adam") else {}


@jax.jit
def adam_noise(opt_state: Any, b1: float, b2: float) -> jax.Array:
    """`sum_k (v_k - m_k^2)` over all weights, with Adam's bias-corrected moments: the variance of its gradients, f32[]."""
    adam = optax.tree.get(opt_state, "ScaleByAdamState")

    def scale(b):
        return 1.0 / (1.0 - b ** jnp.maximum(adam.count, 1).astype(jnp.float32))

    return scale(b2) * optax.tree.sum(adam.nu) - scale(b1) ** 2 * optax.tree.norm(adam.mu, squared=True)


CONFLICTS = (
    Conflict(("knobs.reset", "config.optimizer.schedule"), "method {method!r} resets the optimiser, with which "
             "optimizer.schedule={1!r} would begin again and not end at 0",
             "set optimizer.schedule=constant, or take another method", lambda reset, schedule: schedule != "constant"),)


def keys(c: ConfigDict) -> None:
    """The optimiser."""
    c.optimizer = ConfigDict()
    c.optimizer.name = "adamw"         # "adam", "lion", "muon", "adafactor", "rmsprop", "sgd", module:function ("optax:nadam")
    c.optimizer.learning_rate = 1e-4   # peak learning rate, reached after warmup_updates
    c.optimizer.warmup_updates = 5     # planned updates, also without a gradient, of the linear warm-up of the learning rate
    c.optimizer.schedule = "constant"  # rate after the warm-up; "linear" and "cosine" decay to 0 at the last planned update
    c.optimizer.weight_decay = 0.0     # decoupled weight decay: each update subtracts learning rate x this x weight
    c.optimizer.decayed = "all"        # weights that decay: "all", or "matrices": without norms and biases
    c.optimizer.b1 = -1.0              # decay of the first moment; -1: the optimiser's default, 0.9 for Adam
    c.optimizer.b2 = -1.0              # decay of the second moment; -1: the optimiser's default, 0.999 for Adam
    c.optimizer.momentum = 0.0         # of SGD and RMSProp: decay of the sum of updates; 0: none
    c.optimizer.clip_norm = 1.0        # gradients are scaled down to this global norm; 0: off
    c.optimizer.ema = 0.0              # decay of a moving average of the weights (adapters: of A, of B) for `--average`; 0: off


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    o = config.optimizer
    yield from key_values.at_least(config, 0, "optimizer.learning_rate optimizer.warmup_updates optimizer.weight_decay "
                                   "optimizer.clip_norm")
    yield from key_values.finite(config, "optimizer.learning_rate optimizer.weight_decay")
    for name in ("b1", "b2"):
        if o[name] != UNSET[name] and not 0 <= o[name] < 1:
            yield f"config.optimizer.{name} is {o[name]}; give 0 or more and less than 1, or -1: the optimiser's own"
    for name in ("momentum", "ema"):
        if not 0 <= o[name] < 1:
            yield f"config.optimizer.{name} is {o[name]}; give a decay below 1, for example 0.99, or 0: none"
