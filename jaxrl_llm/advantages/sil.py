"""Self-imitation advantages: only what went better than expected counts (arXiv 1806.05635; SPEAR, 2509.22601)."""

import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless


@estimator
def sil() -> Estimator:
    """`A_t = clip(R_t - V_t, 0, 1)` from `extras["returns"]` and `extras["values"]`, both f32[P, G, T]."""

    def advantages(rollouts):
        return jnp.clip(rollouts.extras["returns"] - rollouts.extras["values"], 0, 1)

    return stateless(advantages, needs=("returns", "values"))


@estimator
def spear() -> Estimator:
    """`A_i = r_i - base` for replayed rollouts, base = `extras["reward_baseline"]` f32[P] of today's policy.

    The base is the median of recent group-mean rewards (`control.spear`), so that old successes stop counting once they
    have become ordinary. Which rows are used is decided by the objective of the same name.
    """
    return stateless(lambda rollouts: rollouts.rewards - rollouts.extras["reward_baseline"][:, None],
                     needs=("rewards", "reward_baseline"))
