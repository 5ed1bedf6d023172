"""AdvEvo-MARL: agents with the same function share one mean-return baseline (arXiv 2510.01586)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

SCOPES = ("prompt", "batch", "episode")


@estimator
def advevo_baseline(*, scope: str = "prompt", norm_std: bool = False, eps: float = 1e-6) -> Estimator:
    """`A = R - b`, b the mean return of all agents of the same functional group.

    The G axis holds every (episode, agent) cell of a prompt; `extras["functional_group"]` i32[P, G] names the group
    (attacker, defender, ...), `valid` is False for an agent that is not in play. The mean runs over the cells of the
    same prompt, of the `batch`, or of the same `episode` (`extras["traj"]` i32[P, G]); the paper does not say which, and
    the prompt is our reading. `norm_std` divides by the sample deviation of the same cells + eps.
    A group with a single cell gets 0. The division and its eps are unconfirmed.
    """
    registry.one_of("scope", scope, SCOPES)

    def advantages(rollouts):
        shape = rollouts.valid.shape
        rows = (1, -1) if scope == "batch" else shape
        returns, alive, group = (
            x.reshape(rows) for x in (rollouts.rewards, rollouts.valid, rollouts.extras["functional_group"]))
        same = (group[:, :, None] == group[:, None, :]) & alive[:, None, :]
        if scope == "episode":
            episode = rollouts.extras["traj"]
            same &= episode[:, :, None] == episode[:, None, :]
        cells = jnp.broadcast_to(returns[:, None, :], same.shape)
        result = returns - masked.mean(cells, same, axis=-1)
        if norm_std:
            result = result / (masked.std(cells, same, axis=-1, ddof=1) + eps)
        return result.reshape(shape)

    return stateless(advantages, needs=("rewards", "functional_group", *(("traj",) if scope == "episode" else ())))
