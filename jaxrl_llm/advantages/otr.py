"""One-Token Rollout: a sampled token is worth 1 if it is the expert's, else a little less than 0 (arXiv 2509.26313)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless


@estimator
def otr(*, wrong: float = -0.1) -> Estimator:
    """`A_t = 1` where `tokens` equals `extras["targets"]` i32[P, 1, T], else `wrong`; no baseline.

    There are P expert texts and G tokens sampled at each of their T positions, all after the expert's own prefix. The
    default is unconfirmed.
    """

    def advantages(rollouts):
        hit = rollouts.tokens == rollouts.extras["targets"]
        return jnp.where(hit, 1, wrong).astype(jnp.result_type(float))

    return stateless(advantages, needs=("tokens", "targets"))
