"""Supervised fine-tuning: the likelihood of the trained tokens, whoever wrote them."""
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.tools import registry

MEANS = ("token_mean", "seq_mean_token_mean")


@objective
def sft(*, aggregation: str = "token_mean") -> Objective:
    """`-sum(w log p) / sum(w)` over the trained tokens of the mini-batch, w the weight of the token's text.

    `extras["weight"]` f32[P, G] are the weights, at least 0; without them all are 1. `aggregation`: `token_mean`, or
    `seq_mean_token_mean`, the mean of the texts' token means, `-sum_i w_i mean_t(log p) / sum_i w_i`. Advantages are not used.
    The metric `nll` is the mean of -log p over the trained tokens, without weights. Raises ValueError for another aggregation.
    """
    shares = text_shares(aggregation)

    def token_loss(logprobs, rollouts, advantages):
        return {"weighted": -logprobs}, {"nll": -logprobs}

    return token_objective(token_loss, extra_weights=shares, shares="weighted")


def text_shares(aggregation: str) -> Callable[[Rollouts], dict[str, Array]]:
    """A function of a mini-batch: `"weighted"` f32[P, G, T], the share of each token in a mean over texts with weights.

    Raises ValueError for another aggregation.
    """
    registry.one_of("aggregation of supervised learning", aggregation, MEANS)

    def shares(rollouts):
        weights = masked.to_tokens(text_weights(rollouts), rollouts.token_mask)
        if aggregation == "seq_mean_token_mean":
            weights = weights / jnp.maximum(masked.count(rollouts.token_mask, axis=2, keepdims=True), 1)
        total = masked.sum(weights, rollouts.token_mask)
        return {"weighted": weights / jnp.where(total > 0, total, 1)}

    return shares


def text_weights(rollouts: Rollouts) -> Array:
    """f32[P, G], `extras["weight"]`; 1 without that record."""
    given = rollouts.extras.get("weight")
    return jnp.ones(rollouts.valid.shape) if given is None else given
