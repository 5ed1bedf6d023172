"""One-Token Rollout: expert text as one-step rollouts, K sampled tokens per position (arXiv 2509.26313).

As a composition it is the plain policy gradient on P expert texts with G = K tokens sampled at each position, which the
estimator `otr` rewards. The functions here do the same in one forward pass, without generation, for code that has the
logits [..., V]. No code is public: log-probs at temperature 1 in the loss are our reading, the defaults of `wrong` and
`temperature` are unconfirmed.
"""
import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective
from jaxrl_llm.objectives.reinforce import reinforce


@objective
def otr() -> Objective:
    """`l_t = -A_t log p_t`, mean over the sampled tokens: `one_token_loss` from log-probs, A from the estimator `otr`.

    `tokens` i32[P, G, T] holds G samples at each position, `logprobs` their log-probs after the expert's prefix, and
    `mask` marks the expert text, repeated G times. There is no ratio and no baseline.
    """
    return reinforce(aggregation="token_mean")


def sample_tokens(key: Array, logits: Array, *, samples: int = 256, temperature: float = 1.3) -> Array:
    """i32[N, T, K]: tokens drawn with replacement from `softmax(logits / temperature)`, logits [N, T, V].

    They are drawn by inverting the cumulative distribution: memory grows with V + K per position, not with V * K.
    """
    probs = jax.nn.softmax(logits.astype(jnp.float32) / temperature).reshape(-1, logits.shape[-1])
    draw = jax.vmap(lambda key, p: jax.random.choice(key, p.shape[-1], (samples,), p=p))
    return draw(jax.random.split(key, len(probs)), probs).reshape(*logits.shape[:-1], samples).astype(jnp.int32)


def one_token_loss(logits: Array, targets: Array, mask: Array, tokens: Array, *, wrong: float = -0.1) -> Array:
    """Mean over the positions in `mask` of `-(1/K) sum_j R_j log p(a_j)`, R = 1 if a_j is the target, else `wrong`.

    `logits` [N, T, V], `targets` i32[N, T], `mask` bool[N, T], `tokens` i32[N, T, K] from `sample_tokens`.
    """
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens, axis=-1)
    rewards = jnp.where(tokens == targets[..., None], 1, wrong)
    return masked.mean(-jnp.mean(rewards * logprobs, axis=-1), mask)


def expected_one_token_loss(logits: Array, targets: Array, mask: Array, *, wrong: float = -0.1,
                            temperature: float = 1.3) -> Array:
    """`one_token_loss` in expectation over the samples (K to infinity): `-sum_a q(a) R(a) log p(a)`, q detached."""
    behavior = lax.stop_gradient(jax.nn.softmax(logits / temperature))
    hit = jnp.arange(logits.shape[-1]) == targets[..., None]
    return masked.mean(-jnp.sum(behavior * jnp.where(hit, 1, wrong) * jax.nn.log_softmax(logits), axis=-1), mask)
