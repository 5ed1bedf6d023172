"""R3L's advantage: base rollouts and their guided retries in one group, successes amplified (arXiv 2601.03715)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.soft_value import soft_value
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


@estimator
def r3l(*, alpha: float = 3.0, baseline: str = "mean", tau: float = 1.0) -> Estimator:
    """With `s = r - b`: `A = 1` where r >= 1, `alpha * s` where s >= 0, else `s`.

    b is the mean reward of the prompt's valid rollouts, or with `baseline="soft"` `tau * log(mean of exp(r / tau))`. A
    group of one has b = 0, so that a reflection or guided retry can be entered as a separate prompt with reward 1. A
    group in which all succeed keeps A = 1; one in which all fail alike gets 0. alpha and tau are the published code's.
    """
    registry.one_of("baseline", baseline, ("mean", "soft"))

    def advantages(rollouts):
        rewards, valid = rollouts.rewards, rollouts.valid
        soft = baseline == "soft"
        centre = soft_value(rewards, valid, temperature=tau) if soft else masked.group_mean(rewards, valid)
        score = rewards - masked.unless_alone(centre, valid)
        return jnp.where(rewards >= 1, 1, jnp.where(score >= 0, alpha * score, score))

    return stateless(advantages)
