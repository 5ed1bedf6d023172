"""What a filter and a controller are: pure functions that a loop calls around the update.

A filter says which prompts of a batch of rollouts are worth an update; a controller turns what was observed into the
settings of the next step. To add one, write a keyword-only factory under `@prompt_filter` or `@controller` into a file
of this folder:

    @controller
    def warmer(*, rise: float = 0.01) -> Controller:
        return Controller(lambda: jnp.float32(1), lambda t: {"temperature": t}, lambda t, facts: t + rise)
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax import Array

from jaxrl_llm import registry
from jaxrl_llm.rollouts import Rollouts, measured

State = Any
FILTERS: dict[str, registry.Factory] = {}
CONTROLLERS: dict[str, registry.Factory] = {}
controller = functools.partial(registry.register, CONTROLLERS, "controller")


class Filter(NamedTuple):
    """`keep(rollouts)`: bool[P], prompts that enter the batch (a trainer samples others in place of the rest).

    With `per="rollout"` it is bool[P, G], rollouts that stay in the loss: to be applied to their mask AFTER the
    advantages. `needs` names fields of `Rollouts`, or entries of its `extras`, that `keep` reads.
    """

    keep: Callable[[Rollouts], Array]
    needs: tuple[str, ...] = ("rewards",)
    per: str = "prompt"


class Controller(NamedTuple):
    """`init(...) -> state`; `propose(state) -> settings by name`; `observe(state, facts by name) -> state`, all pure.

    `init` takes what the state's shape depends on, if anything: sizes, parameters. States are pytrees, to be saved with a run.
    `facts` names what `observe` reads, `knobs` what `propose` sets.
    """

    init: Callable[..., State]
    propose: Callable[[State], dict[str, Any]]
    observe: Callable[[State, Mapping[str, Any]], State]
    facts: tuple[str, ...]
    knobs: tuple[str, ...]


def prompt_filter(factory: registry.Factory) -> registry.Factory:
    """Registers a factory of filters, whose `keep` gets what was measured in float32, whatever the caller has."""

    @functools.wraps(factory)
    def made(**hyper):
        found = factory(**hyper)
        return found._replace(keep=lambda rollouts: found.keep(measured(rollouts)))

    return registry.register(FILTERS, "filter", made)
