"""One-Token Rollout: every token of a given text is a rollout of K one-token answers (arXiv 2509.26313).

No code is public: log-probs at temperature 1 in the loss are our reading, the defaults are unconfirmed.
"""
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.rollouts import POSITION, SEEDS
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.sft import text_shares
from jaxrl_llm.tools.ranges import POSITIVE, Range


@objective(ranges={"samples": Range(0), "temperature": POSITIVE})
def otr(*, samples: int = 256, temperature: float = 1.3, wrong: float = -0.1, aggregation: str = "token_mean") -> Objective:
    """`one_token_loss` of each trained token, a mean over the mini-batch with the weights of texts, as `sft` has them.

    With `samples=0` it is the expectation over the samples, `expected_loss`, which draws nothing. Both are computed within the
    chunks of logits: no array [T, V] or [T, samples] is kept. The metric `nll` is the mean of -log p of the given tokens.
    """
    shares = text_shares(aggregation)
    position = (functools.partial(one_token_loss, samples=samples, temperature=temperature, wrong=wrong) if samples else
                functools.partial(expected_loss, temperature=temperature, wrong=wrong))

    def token_loss(logprobs, rollouts, advantages):
        return {"weighted": rollouts.extras[POSITION]}, {"nll": -logprobs}

    return token_objective(token_loss, needs=(SEEDS,) if samples else (), extra_weights=shares, shares="weighted",
                           position=position)


def one_token_loss(logits: Array, token: Array, seed: Array, *, samples: int = 256, temperature: float = 1.3,
                   wrong: float = -0.1) -> Array:
    """`-(1/K) sum_j R_j log p(a_j)` of K samples at one position, R = 1 if a_j is the given `token`, else `wrong`; f32[].

    `logits` f32[V] of p, `seed` u32[] of the samples: `drawn`.
    """
    return loss_of(logits, token, drawn(logits, seed, samples=samples, temperature=temperature), wrong=wrong)


def loss_of(logits: Array, token: Array, samples: Array, *, wrong: float = -0.1) -> Array:
    """`one_token_loss` of these `samples` i32[K]."""
    rewards = jnp.where(samples == token, 1, wrong)
    return -jnp.mean(rewards * (logits[samples] - jax.nn.logsumexp(logits)))


def drawn(logits: Array, seed: Array, *, samples: int, temperature: float) -> Array:
    """i32[K], tokens drawn with replacement from `softmax(logits / temperature)`, by inverting the cumulative distribution."""
    chances = jax.nn.softmax(lax.stop_gradient(logits).astype(jnp.float32) / temperature)
    return jax.random.choice(jax.random.key(seed), logits.shape[0], (samples,), p=chances).astype(jnp.int32)


def expected_loss(logits: Array, token: Array, seed: Array, *, temperature: float = 1.3, wrong: float = -0.1) -> Array:
    """`one_token_loss` in expectation, `-sum_a q(a) R(a) log p(a)`, q = softmax(logits / temperature), detached; f32[]."""
    chances = lax.stop_gradient(jax.nn.softmax(logits / temperature))
    rewards = jnp.where(jnp.arange(logits.shape[0]) == token, 1, wrong)
    return -jnp.sum(chances * rewards * jax.nn.log_softmax(logits))
