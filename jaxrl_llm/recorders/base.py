"""The interface of a recorder, and the table of those that runs make by name.

To add one, write a function from a `Context` to a `Recorder` under `@recorder`, in a file of this folder or of your own:

    @recorder("surprise", provides=("surprise",), passes=1)
    def surprise(context: Context) -> Recorder:
        def record(own, params, lora, rollouts):
            return {"surprise": -context.logprobs(params, lora, texts_of(rollouts))[0]}

        return Recorder("surprise", ("surprise",), record)

A run whose method needs `surprise` makes it. A `Learner` of your own takes the recorder as it is, after its others:
`dataclasses.replace(learner, recorders=(*learner.recorders, yours))`.
"""
import dataclasses
from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

from jax import Array
from ml_collections import ConfigDict

from jaxrl_llm.data.rollouts import OWN_ROUTES, ROUTES, SEEDS, Rollouts
from jaxrl_llm.tools import registry


class Recorder(NamedTuple):
    """`record(own, params, lora, rollouts) -> arrays by name`, each a field of `Rollouts` or an entry of its `extras`.

    `params`, `lora` are the policy's, `own` is the pytree that the recorder keeps beside it, made by `init(params)`; None:
    nothing. `provides` names the arrays. `fit(own, policy, rollouts) -> (own, metrics)`, with `policy = (params, lora)`, trains
    `own` on each mini-batch, before the policy's update; None: it is frozen. `updates`: updates of its optimiser in a fit.
    `fits_first`: it is fitted once to each whole batch instead, after a first record, and what it records then is what the step
    reads. `given` is `own` if it is neither made from the policy nor trained: weights of another model, which a run does not
    save.
    """

    name: str
    provides: tuple[str, ...]
    record: Callable[[Any, Any, Any, Rollouts], dict[str, Array]]
    init: Callable[[Any], Any] | None = None
    fit: Callable[[Any, tuple[Any, Any], Rollouts], tuple[Any, dict[str, Array]]] | None = None
    given: Any = None
    updates: int = 1
    fits_first: bool = False


class Context(NamedTuple):
    """What the factory of a recorder may read of a run.

    Attributes:
      asked: fields to record, some of those that the recorder provides.
      config, policy, estimator: those of the run, see `learning.policy.Policy`.
      logprobs: `(params, lora, rollouts) -> (logprobs, entropies)` f32[P, G, T], of the policy in the layout of the run.
      jitted: `(function, owner, parts=1, **settings)`, see `learning.step.jitted`.
      guarded: `(name, jitted function, times=1)`, the function for the shapes of the run's batches, called with each of them
        in `times` ways; any other shape is an error.
      optimizer: `(learning rate, updates=1) -> optax.GradientTransformation`, the configured one, for that number of updates
        on each mini-batch.
      loaded: `(key) -> [(logprobs, weights)]` of the frozen models that `config.teacher` names under this key.
      pieces: number of parts of a batch whose log-probs are computed one after another.
      features, placed: those of the layout of the run, see `learning.layouts.Layout`.
      square_norms: see `learning.gradient_norms`.
      as_sampled: see `replay.Replay`.
    """

    asked: Set[str]
    config: Any
    policy: Any
    estimator: Any
    logprobs: Callable
    jitted: Callable
    guarded: Callable
    optimizer: Callable
    loaded: Callable
    pieces: int = 1
    features: Callable | None = None
    placed: Callable | None = None
    square_norms: Callable | None = None
    as_sampled: bool = False


@dataclasses.dataclass(frozen=True)
class RecorderKind(registry.Kind):
    """A recorder that runs make by name, by `make(context)`, if their method needs one of the fields that it `provides`.

    `needs`: fields of rollouts, or parts of a run such as `config.teacher.path` and `estimator.value_targets`, without which it
    cannot be made. `passes`: number of its forward passes of the policy's model over a batch. `copies`: whether it keeps a copy
    of the policy's weights, unless adapters are trained.
    """

    passes: int = 0
    copies: bool = False


RECORDERS = registry.PartTable("recorder", Recorder, keywords=False, kind=RecorderKind, given=("context",))


def recorder(name: str, **facts: Any) -> Callable[[Callable[[Context], Recorder]], Callable[[Context], Recorder]]:
    """Enters a factory into the table under the name of its recorders, with the facts of its `RecorderKind`."""
    return RECORDERS.enter(name=name, **facts)


def _able(there: Iterable[str]) -> dict[str, RecorderKind]:
    """The recorders that can be made in a run with the fields and parts that are `there`."""
    return {name: kind for name, kind in RECORDERS.items() if {*kind.needs} <= {*there}}


def recordable(there: Iterable[str]) -> set[str]:
    """The fields that recorders provide in a run with the fields and parts that are `there`."""
    return {field for kind in _able(there).values() for field in kind.provides}


def named(name: str) -> registry.Kind:
    """The recorder of that name, or your own "module:function"; ValueError for a function that is not entered."""
    kind = RECORDERS.find(name)
    if not kind.provides:
        raise ValueError(f"{name} is no recorder whose fields are known; put @recorder(NAME, provides=(FIELD,)) above it")
    return kind


def asked(needs: Iterable[str], there: Iterable[str], first: Iterable[str] = ()) -> dict[str, set[str]]:
    """Names of the recorders that a run makes for these needs, with the fields that each is asked for.

    Of several recorders of a field one of those is asked that are named `first`; then the one with the most needs, which was
    configured for it; then one that is asked for other fields anyway; then the one that provides the fewest.
    """
    able, ahead = _able(there), [named(name) for name in first]
    of = {field: [name for name, kind in able.items() if field in kind.provides] for field in needs}
    chosen: dict[str, set[str]] = {}
    for field in sorted(of, key=lambda field: (len(of[field]), field)):  # first the fields that only one provides
        if of[field]:
            best = min(of[field], key=lambda name: (
                able[name] not in ahead, -len(able[name].needs), name not in chosen, len(able[name].provides), name))
            chosen.setdefault(best, set()).add(field)
    return chosen


def make(name: str, context: Context) -> Recorder:
    """The recorder of that name for a run; ValueError if it provides less than it was registered for and asked for."""
    made = RECORDERS.find(name).make(context)
    if lost := context.asked - {*made.provides}:
        raise ValueError(f"recorder {name!r} is asked for {', '.join(sorted(lost))}, and what its factory returned provides "
                         f"{', '.join(made.provides) or 'nothing'}; add them, or leave them out of `provides` of @recorder")
    return made


def texts_of(batch: Rollouts) -> Rollouts:
    """The fields that log-probs are computed from, so that one program serves batches with any further fields."""
    read = {name: batch.extras[name] for name in (ROUTES, OWN_ROUTES, SEEDS) if name in batch.extras}
    return Rollouts(mask=batch.mask, valid=batch.valid, tokens=batch.tokens, prompt_tokens=batch.prompt_tokens, extras=read,
                    prompt_mask=batch.prompt_mask, temperature=batch.temperature, filled=batch.filled, role=batch.role)


def recorded(rollouts: Rollouts, arrays: dict[str, Array]) -> Rollouts:
    """The rollouts with these arrays, in their fields or in `extras`."""
    fields = {name: value for name, value in arrays.items() if name in Rollouts.__dataclass_fields__}
    others = {name: value for name, value in arrays.items() if name not in fields}
    return rollouts.replace(**fields, extras={**rollouts.extras, **others})


def keys(c: ConfigDict) -> None:
    """Teachers of distillation."""
    c.teacher = ConfigDict()           # frozen teachers of distillation: log-probs of the policy's own tokens
    c.teacher.path = ""                # as model.path; for several tasks one teacher each, separated by commas
    c.teacher.base = ""                # model that teachers are compared with; empty: the initial policy
