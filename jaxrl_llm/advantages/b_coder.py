"""B-Coder: values of tokens whose advantages are the policy's own logits, fitted to conservative targets (arXiv 2310.03173)."""
import math

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.data.rollouts import Rollouts, clean
from jaxrl_llm.maths import masked

NEEDS = ("rewards", "values", "old_logprobs", "max_logprobs", "greedy_logprobs")


def bounded(v: Array) -> Array:
    """`V = 1 - softabs(v)`, at most 1, the best return; `softabs(x) = (softplus(x) + softplus(-x)) / 2 - ln 2`.

    The paper prints `+ ln 2`, with which no value reaches a return of 1.
    """
    return 1 - (jnp.logaddexp(v, 0) + jnp.logaddexp(-v, 0)) / 2 + math.log(2)


def unbounded(value: Array) -> Array:
    """The inverse of `bounded`: the `v >= 0` that it maps to a value; 0 for values above 1."""
    return 2 * jnp.arccosh(jnp.exp(jnp.maximum(1 - value, 0)))


def following(x: Array, mask: Array) -> Array:
    """f32[P, G, T]: the value at the next True entry of a row, 0 after the last one."""
    length = mask.shape[-1]
    here = lax.cummin(jnp.where(mask, jnp.arange(length), length), axis=mask.ndim - 1, reverse=True)  # or the next one
    behind = jnp.pad(here[..., 1:], ((0, 0),) * (mask.ndim - 1) + ((0, 1),), constant_values=length)
    return jnp.take_along_axis(x, behind, axis=-1, mode="fill", fill_value=0)


def bellman_targets(rewards: Array, values: Array, greedy: Array, mask: Array, gamma: float) -> Array:
    """`y_t = r_t + gamma (A(s', a') + V(s'))` f32[P, G, T], s' the state after token t, 0 after the last one.

    Args:
      rewards: f32[P, G], given for the last token.  values: V f32[P, G, T] of the state before each token.
      greedy: f32[P, G, T], A of the token that the frozen model would have taken in that state.
    """
    last = jnp.where(masked.last_token(mask), rewards[..., None], 0)
    return last + gamma * following(greedy + values, mask)


def program_scores(q: Array, values: Array, mask: Array, gamma: float) -> Array:
    """f32[P, G]: the sum of recovered rewards `Q(s_t, a_t) - gamma V(s_{t+1})`, which ranks candidates without tests."""
    return masked.sum(q - gamma * following(values, mask), mask, axis=-1)


@estimator
def b_coder(*, alpha: float = 1.0, gamma: float = 0.999) -> Estimator:
    """`y - V + alpha max_a log p`, the target of a token's `alpha log p`: there `Q = y`, see `objectives.b_coder`.

    `Q(s, a) = alpha (log p(a) - max log p) + V`, `V = bounded(v)`, v the critic's output (`extras["values"]`); the critic is
    fitted so that Q equals the target y. `extras["max_logprobs"]` are the largest log-probs of the policy, `greedy_logprobs`
    its log-probs of the most likely tokens under the model at the start of the run; all f32[P, G, T]. The metric
    `b_coder/ranked` is the share of pairs of rollouts of a prompt with unequal rewards that `program_scores` orders alike.
    """
    def parts(rollouts: Rollouts):
        extras, mask = rollouts.extras, rollouts.token_mask
        values = bounded(extras["values"])
        greedy = alpha * (extras["greedy_logprobs"] - extras["max_logprobs"])
        own = alpha * (rollouts.old_logprobs - extras["max_logprobs"])
        return values, own, bellman_targets(rollouts.rewards, values, greedy, mask, gamma)

    def advantages(rollouts, state):
        values, _, targets = parts(rollouts)
        return targets - values + alpha * rollouts.extras["max_logprobs"], state

    def value_targets(rollouts, monte_carlo):
        rollouts = lax.stop_gradient(clean(rollouts, *NEEDS))
        mask = rollouts.token_mask
        _, own, targets = parts(rollouts)
        if monte_carlo:
            behind = jnp.flip(jnp.cumsum(jnp.flip(mask, -1), -1), -1) - 1  # number of trained tokens after each
            targets = gamma ** behind * rollouts.rewards[..., None]
        return jnp.where(mask, unbounded(targets - (0 if monte_carlo else own)), 0)

    def metrics(rollouts, advantages, state):
        values, own, _ = parts(rollouts)
        scores = program_scores(own + values, values, rollouts.token_mask, gamma)
        better = rollouts.rewards[:, :, None] > rollouts.rewards[:, None]
        pairs = better & rollouts.valid[:, :, None] & rollouts.valid[:, None]
        ahead = jnp.sign(scores[:, :, None] - scores[:, None]) / 2 + 0.5
        return {"b_coder/ranked": masked.mean(ahead, pairs), "b_coder/score": masked.mean(scores, rollouts.live)}

    return stateful(lambda: (), advantages, needs=NEEDS, metrics=metrics)._replace(value_targets=value_targets)
