"""ReMax: the reward of the policy's greedy completion is the baseline of its prompt (arXiv 2310.10505)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.tools.registry import Conflict

_TOGETHER = Conflict(
    ("reward",), "{part} compares with a greedy completion, which is scored apart from the others, and a reward of {0.names} "
    "compares the completions of a batch", "leave that reward out, or give it splits=True if it scores each by itself",
    lambda reward: not reward.by_row)
_OLD = tuple(Conflict((value,), f"{{part}} compares with a greedy completion by the weights of the step; {who} have none",
                      "leave them out, or take another estimator")
             for value, who in (("replays", "replayed groups"), ("config.pool.path", "groups of a pool")))
_GREEDY = Conflict(
    ("config.sampling.temperature", "knobs", "config.environment"),
    "config.sampling.temperature is 0, at which every completion is the greedy one that {part} compares it with",
    "give more than 0, usually 1",
    lambda temperature, knobs, environment: not (temperature or "temperature" in knobs or environment))


@estimator(conflicts=(_TOGETHER, _GREEDY, *_OLD))
def remax() -> Estimator:
    """`A_i = r_i - r_greedy`, r_greedy the reward of the completion that the same policy draws at temperature 0.

    `extras["greedy_rewards"]` f32[P] are these rewards. The stage `greedy` samples them for every drawn prompt, and nothing is
    trained on that completion. The baseline does not depend on completion i, so the gradient is unbiased also for one
    completion of a prompt, as many as the paper samples. A prompt whose greedy completion was lost (NaN) gets 0. The authors'
    code also discounts the difference by 0.99 for each token before the end, and subtracts `0.05 (log p - log p_ref)` of the
    token.
    """
    def advantages(rollouts):
        greedy = rollouts.extras["greedy_rewards"][:, None]
        return jnp.where(jnp.isfinite(greedy), rollouts.rewards - greedy, 0)

    return stateless(advantages, needs=("rewards", "greedy_rewards"))
