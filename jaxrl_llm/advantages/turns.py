"""Estimators whose rows are turns, for rollouts that are trajectories."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.rollouts import Rollouts


def rows_of_turns(rollouts: Rollouts) -> Rollouts:
    """Trajectories `[P, G, T]` with K turns at most as rows `[P, G K, 1]`, one for each turn.

    Reads the extras that `forest.turn_facts` makes, `[P, G, K]`: a turn is there where `step` is not negative. A reward is that
    of the trajectory.
    """
    valid = rollouts.valid[..., None] & (rollouts.extras["step"] >= 0)
    P, G, K = valid.shape

    def flat(x):
        return x.reshape(P, G * K)

    extras = {name: flat(x) for name, x in rollouts.extras.items() if x.shape == valid.shape}
    return Rollouts(mask=flat(valid)[..., None], valid=flat(valid), rewards=flat(jnp.broadcast_to(rollouts.rewards[..., None],
                                                                                               valid.shape)), extras=extras)


def of_turns(estimator: Estimator) -> Estimator:
    """The estimator of trajectories that gives each token the advantage of its turn (`step_ids`).

    `estimator` compares rows that are turns, and has no other functions than `init` and `update`.
    """
    def update(rollouts, state):
        advantages, state = estimator.update(rows_of_turns(rollouts), state)
        turns = advantages[..., 0].reshape(rollouts.extras["step"].shape)
        place = jnp.clip(rollouts.step_ids, 0, turns.shape[-1] - 1)
        return jnp.where(rollouts.token_mask, jnp.take_along_axis(turns, place, axis=-1), 0), state

    return Estimator(estimator.init, update, (*estimator.needs, "step_ids"))
