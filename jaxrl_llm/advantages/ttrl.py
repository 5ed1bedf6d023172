"""TTRL: the majority answer of the group is the label, and agreement with it the reward (arXiv 2504.16084)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.maths import masked


def majority(answers_PG: Array, valid_PG: Array) -> tuple[Array, Array]:
    """(label i32[P], its share of the valid votes f32[P]) from answer ids i32[P, G], negative if unreadable.

    A tie goes to the answer that came first. Unreadable votes count in the share but cannot win; without a readable
    vote the label is -1 and the share 0.
    """
    readable = valid_PG & (answers_PG >= 0)
    agree = (answers_PG[:, :, None] == answers_PG[:, None, :]) & readable[:, :, None] & readable[:, None, :]
    votes = jnp.sum(agree, axis=2, dtype=jnp.int32)
    label = jnp.take_along_axis(answers_PG, jnp.argmax(votes, axis=1)[:, None], axis=1)[:, 0]
    share = jnp.max(votes, axis=1, initial=0) / jnp.maximum(masked.count(valid_PG, axis=1), 1)
    return jnp.where(jnp.any(readable, axis=1), label, -1), share


def majority_reward(answers_PG: Array, valid_PG: Array) -> Array:
    """1.0 where a readable answer is the group's majority answer, 0.0 elsewhere, [P, G]."""
    label, _ = majority(answers_PG, valid_PG)
    return jnp.where(valid_PG & (answers_PG >= 0) & (answers_PG == label[:, None]), 1.0, 0.0)


@estimator
def ttrl(*, train_rollouts: int = 32, eps: float = 1e-6) -> Estimator:
    """Group z-score of `majority_reward(extras["answers"])` over each prompt's first `train_rollouts` valid rollouts.

    All valid rollouts vote; `answers` i32[P, G] are ids of normalised answers, negative if unreadable. Rollouts that
    only vote leave the token mean as well: the others are multiplied by (number of tokens) / (number of trained ones).
    The published code lets unreadable answers win the vote, this code does not; 32, out of 64 votes, is the published
    number, eps as in `grpo`.
    """

    def advantages(rollouts):
        valid, mask = rollouts.valid, rollouts.token_mask
        trained = valid & (jnp.cumsum(valid, axis=1, dtype=jnp.int32) <= train_rollouts)
        reward = majority_reward(rollouts.extras["answers"], valid)
        scores = jnp.where(trained, group_z_score(reward, trained, eps=eps), 0)
        return over_kept(masked.to_tokens(scores, mask), mask & trained[..., None], mask)

    return stateless(advantages, needs=("answers",))
