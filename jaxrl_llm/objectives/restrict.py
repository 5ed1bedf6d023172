"""Rollouts that an objective excludes: from the loss and from its denominator."""
from collections.abc import Callable

from jax import Array

from jaxrl_llm.data.rollouts import Rollouts, check, measured
from jaxrl_llm.objectives.base import Objective


def restrict(objective: Objective, keep: Callable[[Rollouts], Array], *, needs: tuple[str, ...] = ()) -> Objective:
    """`objective` on the rollouts where `keep(rollouts)` bool[P, G] holds; advantages are computed from all rollouts.

    `keep` may depend on a rollout's own prompt only, so that micro-batches agree. `needs` names the fields that `keep`
    reads. Setting the advantage to 0 instead would leave the tokens in the denominator.
    """

    def narrow(rollouts):
        kept = keep(measured(check(rollouts, *needs)))
        return rollouts.replace(mask=rollouts.mask & kept[..., None])

    def update(logprobs, rollouts, advantages, state):
        return objective.update(logprobs, narrow(rollouts), advantages, state)

    return objective._replace(update=update, weights=lambda rollouts: objective.weights(narrow(rollouts)),
                              needs=(*objective.needs, *needs))
