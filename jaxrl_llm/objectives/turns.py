"""Objectives of methods whose rows are turns, for rollouts that are trajectories."""
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import APART, Rollouts, without_apart
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.tools.memo import remembered


@remembered(16)
def of_turns(objective: Objective) -> Objective:
    """The objective with token shares as if each turn were a separate rollout.

    A turn is the tokens with one number in `step_ids`; extras of turns, at most K per trajectory, are `[P, G, K]`.
    The loss of a token must not depend on the other tokens of its rollout. Terms that learn apart, from words of an environment
    or from given texts, weigh their tokens in whole trajectories.
    """
    def weights(rollouts):
        own = of_rows(without_apart(rollouts))
        if APART not in rollouts.extras:
            return own
        return own | {name: x for name, x in objective.weights(rollouts).items() if name not in own}

    def of_rows(rollouts):
        step = rollouts.extras["step"]
        P, G, K = step.shape
        mask = rollouts.mask[:, :, None, :] & (rollouts.step_ids[:, :, None, :] == jnp.arange(K)[:, None])
        there = rollouts.valid[..., None] & (step >= 0)
        rows = Rollouts(mask=mask.reshape(P, G * K, -1), valid=there.reshape(P, G * K))
        return {name: x.reshape(P, G, K, *x.shape[2:]).sum(2) for name, x in objective.weights(rows).items()}

    def update(logprobs, rollouts, advantages, state):
        if rollouts.loss_weights is None:
            rollouts = rollouts.replace(loss_weights=weights(rollouts))
        return objective.update(logprobs, rollouts, advantages, state)

    return objective._replace(update=update, weights=weights, needs=(*objective.needs, "step_ids"))
