"""SignBalance: the verifier's sign with one magnitude for right rollouts, balanced by the wrong ones (arXiv 2609.04063)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools.ranges import POSITIVE


@estimator(ranges={"scale": POSITIVE})
def sign_balance(*, scale: float = 1.0) -> Estimator:
    """`A = scale` for right rollouts, `A = -scale n+ / n-` for wrong ones; n+ right and n- wrong valid rollouts of the prompt.

    Right as in `Rollouts.correct`. GRPO's magnitude for 0/1 rewards, `sqrt(n- / n+)`, grows as right rollouts get rarer, for
    guesses as for reasoning; here the magnitude of a right rollout is constant, and the advantages of a group still sum to 0.
    `n+ / n-` is undefined for a group without a wrong rollout. Such a group gets 0, which is our choice, as does a group
    without a right one. The scale is the paper's; the paper's code is not released.
    """
    def advantages(rollouts):
        right, wrong = rollouts.valid & rollouts.correct, rollouts.valid & ~rollouts.correct
        n_right, n_wrong = (masked.group_count(x).astype(rollouts.rewards.dtype) for x in (right, wrong))
        signed = jnp.where(right, scale, -scale * n_right / jnp.maximum(n_wrong, 1))
        return jnp.where(n_wrong > 0, signed, 0)

    return stateless(advantages)
