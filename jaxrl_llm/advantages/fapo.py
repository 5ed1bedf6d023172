"""FAPO: correct answers reached by faulty reasoning earn less than clean ones (arXiv 2510.22543)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.rewards.length import soft_overlong


def flawed_reward(correct: Array, flawed: Array, *, penalty: float) -> Array:
    """+1 correct, `1 - penalty` correct but flawed, -1 wrong; any shape."""
    return jnp.where(correct, 1 - penalty * flawed, -1.0)


@estimator
def fapo(*, penalty: float = 1.0, max_len: int | None = None, cache_len: int | None = None, eps: float = 1e-6) -> Estimator:
    """Group z-score of `+1` (correct), `1 - penalty` (correct, but `extras["flawed"]` bool[P, G]), `-1` (wrong).

    Correct as in `Rollouts.correct`. With penalty 1 a flawed answer has a positive advantage exactly if the group has more
    wrong than clean answers. With `max_len` DAPO's overlong penalty over the last `cache_len` tokens (default: half) is
    added; `methods.build` gives the generation budget to every part that has this keyword, so the catalogue's FAPO has
    the penalty. The published code has penalty 1 built in; eps as in `grpo`.
    """
    if max_len is not None:
        overlong = soft_overlong(max_len, max_len // 2 if cache_len is None else cache_len)

    def advantages(rollouts):
        rewards = flawed_reward(rollouts.correct, rollouts.extras["flawed"], penalty=penalty)
        if max_len is not None:
            rewards = rewards + overlong(rollouts.lengths)
        return group_z_score(rewards.astype(rollouts.rewards.dtype), rollouts.valid, eps=eps)

    return stateless(advantages, needs=("rewards", "flawed"))
