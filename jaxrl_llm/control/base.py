"""The interface of filters and controllers: pure functions that a loop calls around the update.

A filter selects the prompts of a batch of rollouts that are worth an update; a controller turns observations (`FACTS`) into
the knobs of the next step (`knobs.Knob`). To add one, write a keyword-only factory under `@prompt_filter` or `@controller`
into a file of this folder:

    @controller
    def warmer(*, rise: float = 0.01) -> Controller:
        return Controller(lambda temperature: jnp.float32(temperature), lambda t: {"temperature": t},
                          lambda t, facts: t + rise, facts=("rewards",), knobs=("temperature",))
"""
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax import Array

from jaxrl_llm.data.rollouts import Rollouts, measured
from jaxrl_llm.tools import registry

State = Any

# Facts that a run lets controllers observe: `score` after each held-out evaluation, those that begin with `measured_` after a
# measure of training problems, the others after each step. A controller reads `score` alone or others; one that reads none
# observes every step; one that reads facts of steps and of measures observes each with its own. Rows of prompts are whole
# groups as they were sampled, some of which may not be valid. A step with nothing left to train on has only the first four.
FACTS = {
    "step": "i32[], the number of the step, from 0",
    "tried": "i32[N] of the training problems, rollouts that were sampled in this step, also those that a filter drops",
    "right": "i32[N], those of them that solve their problem",
    "reference_rates": "f32[K], shares of right rollouts of the `reference_ids` that a controller sets; NaN if not measured",
    "prompt_ids": "i32[P]",
    "rewards": "f32[P, G]",
    "solved": "bool[P, G], rollouts that solve their problem",
    "valid": "bool[P, G], rollouts that exist and were sampled in this step",
    "lengths": "i32[P, G], trained tokens of these",
    "entropy": "f32[], nats, mean over the sampled tokens of the distribution that they were drawn from",
    "rollouts": "`Rollouts` as they were learned from: groups may be cut into several rows",
    "ratios": "f32[P, G, T], probability of each token of `rollouts` after the updates of the step over that before",
    "params": "parameters after the step",
    "replayed_groups": "i32[K, 2], groups that the step has replayed, under a rule that renews priorities",
    "renewed_priorities": "f32[K], their new priorities",
    "metrics": "f32[] by name, those of the step's updates; there are none where nothing was learned from",
    "score": "f32[], the held-out score",
    "measured_tried": "i32[N], answers to each training problem that `measured_times` asked for, before a step",
    "measured_right": "i32[N], those of them that solve their problem",
}


class Known(NamedTuple):
    """A value of a run that the `init` of controllers may take by its name, as the part that knows the value declares it.

    doc: type, shape and meaning.  value: computes it, if a controller takes it.
    of_task: whether it is another value for other training problems.
    """

    name: str
    doc: str
    value: Callable[[], Any]
    of_task: bool = False


class Filter(NamedTuple):
    """`keep(rollouts)`: bool[P], prompts that enter the batch.

    A trainer replaces the other prompts by further samples, or with `refills=False` trains on a smaller batch.

    With `per="rollout"` it is bool[P, G], rollouts that stay in the loss: apply it to their mask AFTER computing the
    advantages. `needs` names fields of `Rollouts`, or entries of its `extras`, that `keep` reads.
    """

    keep: Callable[[Rollouts], Array]
    needs: tuple[str, ...] = ("rewards",)
    per: str = "prompt"
    refills: bool = True


def without(rollouts: Rollouts, keep_PG: Array) -> Rollouts:
    """The rollouts with an empty mask where not kept; apply it AFTER computing the advantages.

    Dropped rollouts stay in the statistics of their group, but leave numerator and denominator of the loss; if all are dropped,
    it is 0.
    """
    return rollouts.replace(mask=rollouts.mask & keep_PG[..., None])


class Controller(NamedTuple):
    """`init(...) -> state`; `propose(state) -> values of knobs by name`; `observe(state, facts by name) -> state`, all pure.

    `init` takes by name the values that the state depends on, if any, among those that a run declares as `Known`. States are
    pytrees of arrays, saved with a run.
    `facts` names the facts that `observe` reads: those of `FACTS`, and facts of prompts in the forest of a step. `knobs` names
    the knobs that `propose` sets; the parts of a run that read them declare them, see `knobs.Knob`. `begin(state) -> state`: at
    the beginning of a later phase of a run, which goes on with the states of the phase before.
    """

    init: Callable[..., State]
    propose: Callable[[State], dict[str, Any]]
    observe: Callable[[State, Mapping[str, Any]], State]
    facts: tuple[str, ...]
    knobs: tuple[str, ...]
    begin: Callable[[State], State] | None = None


FILTERS = registry.PartTable("filter", Filter)
CONTROLLERS = registry.PartTable("controller", Controller, pure=True)
controller = CONTROLLERS.enter


def prompt_filter(factory: registry.Factory | None = None, /, **facts: Any) -> registry.Factory:
    """Enters a factory of filters, whose `keep` gets measurements in float32, whatever the caller's dtype."""
    if factory is None:
        return functools.partial(prompt_filter, **facts)

    @functools.wraps(factory)
    def made(**hyper):
        inner = factory(**hyper)
        return inner._replace(keep=lambda rollouts: inner.keep(measured(rollouts)))

    return FILTERS.enter(made, **facts)
