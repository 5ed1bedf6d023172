"""The interface of filters and controllers: pure functions that a loop calls around the update.

A filter selects the prompts of a batch of rollouts that are worth an update; a controller turns observations (`Fact`) into
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

class Fact(NamedTuple):
    """What controllers may observe, as the part of a run declares it that tells them: modules in `FACTS`, stages in `provides`.

    doc: type, shape and meaning.  of: values of a composition (`setup.values`) that are there and true in runs that have it.
    """

    name: str
    doc: str
    of: tuple[str, ...] = ()


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
    `facts` names the facts that `observe` reads, `knobs` the knobs that `propose` sets; the parts of a run that tell a fact, or
    read a knob, declare it, see `Fact` and `knobs.Knob`. A controller reads `score` alone or others; one that reads none
    observes every step; one that reads facts of steps and of measures observes each with its own. `begin(state) -> state`: at
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
