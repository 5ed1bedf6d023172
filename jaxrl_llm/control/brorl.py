"""BroRL: the learning rate of a larger batch, and the mass of right answers when few are sampled (arXiv 2510.01180)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


def mass_balance(logits: Array, right: Array, sampled: Array, *, rate: float, draws: int, right_reward: float = 1.0,
                 wrong_reward: float = -1.0) -> Array:
    """f32[3]: terms of the change of the mass of right answers in a step on `-(1 / draws) sum_sampled R p`, to first order.

    `logits` f32[V] of a softmax over answers, `right`, `sampled` bool[V], `rate` the step size. The terms come from sampled
    right answers, from sampled wrong ones, and from all answers not sampled: `rate / draws` times `(R_c - S) Q- A2`,
    `(S - R_w) Q+ B2` and `S (Q+ U2- - Q- U2+)`, S the mean reward of the sampled answers by mass. If R_w <= S <= R_c, only the
    last term can be negative.
    """
    p = jnp.exp(logits - jnp.max(logits))
    p = p / jnp.sum(p)
    gained, lost = sampled & right, sampled & ~right
    mass, wrong = jnp.sum(p, where=right), jnp.sum(p, where=~right)
    S = right_reward * jnp.sum(p, where=gained) + wrong_reward * jnp.sum(p, where=lost)
    squares = p**2
    unsampled = S * (mass * jnp.sum(squares, where=~sampled & ~right) - wrong * jnp.sum(squares, where=~sampled & right))
    own = (right_reward - S) * wrong * jnp.sum(squares, where=gained)
    return rate / draws * jnp.stack([own, (S - wrong_reward) * mass * jnp.sum(squares, where=lost), unsampled])


def unsampled_squares(logits: Array, draws: Array) -> Array:
    """f32[V]: `p^2 (1 - p)^N`, each answer's part of the expected sum of squared masses that N draws miss."""
    p = jnp.exp(logits - jnp.max(logits))
    p = p / jnp.sum(p)
    return p**2 * (1 - p)**draws


def learning_rate_factor(batch: Array | int, reference: int) -> Array:
    """f32[]: `sqrt(batch / reference)`, the factor of the learning rate when a batch has another number of rollouts."""
    return jnp.sqrt(jnp.float32(batch) / reference)


@controller
def brorl(*, usual: int = 64) -> Controller:
    """`learning_rate`: the `learning_rate_factor` of G rollouts of a prompt, if the configured rate is for `usual` of them.

    The default is the paper's: its batch has 128 prompts, and ProRL's 512 x 16 rollouts would be 64 for each of them. The
    number of minibatches stays. Facts: `step`. Raises ValueError: less than one rollout.
    """
    if usual < 1:
        raise ValueError(f"usual={usual} rollouts of a prompt; give 1 or more")
    return Controller(lambda group: jnp.int32(group), lambda group: {"learning_rate": learning_rate_factor(group, usual)},
                      lambda group, facts: group, facts=("step",), knobs=("learning_rate",))
