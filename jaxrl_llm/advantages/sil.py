"""Self-imitation advantages: only better-than-expected outcomes count (arXiv 1806.05635; SPEAR, 2509.22601)."""
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.data.rollouts import clean, seen_returns


@estimator
def sil() -> Estimator:
    """`A_t = clip(R_t - V_t, 0, 1)`, V `extras["values"]` f32[P, G, T] of a critic, R the `seen_returns`.

    The critic is fitted to the returns of fresh rollouts; returns of replayed rollouts, which are all successes, can only
    raise it: its target is then `V + clip(R - V, 0, 1)`.
    """

    def advantages(rollouts):
        return jnp.clip(seen_returns(rollouts) - rollouts.extras["values"], 0, 1)

    def targets(rollouts, monte_carlo):
        rollouts = lax.stop_gradient(clean(rollouts, "rewards", "values"))
        returns, values = seen_returns(rollouts), rollouts.extras["values"]
        lifted = values + jnp.clip(returns - values, 0, 1)
        replayed = rollouts.valid & ~rollouts.fresh
        return jnp.where(rollouts.token_mask, jnp.where(replayed[..., None] & (not monte_carlo), lifted, returns), 0)

    return stateless(advantages, needs=("rewards", "values"), value_targets=targets)


@estimator
def spear() -> Estimator:
    """`A_i = r_i - base` for replayed rollouts, base = `extras["reward_baseline"]` f32[P] of today's policy.

    The base is the median of recent group-mean rewards (`control.recent_median`), so that old successes stop counting once they
    have become ordinary. The objective of the same name decides which rows are used.
    """
    return stateless(lambda rollouts: rollouts.rewards - rollouts.extras["reward_baseline"][:, None],
                     needs=("rewards", "reward_baseline"))
