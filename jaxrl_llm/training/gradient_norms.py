"""Norms of the gradients of single completions: VCPO's baseline (arXiv 2602.17616), GVM's allocation (arXiv 2505.02391)."""
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import masked
from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.state import with_trained

ALONE = ("gradient norms of single completions are taken on one device, and this run has {devices}; give it one, or take "
         "another method, for example grpo")


def make(policy: Policy) -> Callable:
    """The jitted `(params, lora, rollouts) -> f32[P, G]`, `|d / d theta sum_t log p_t|^2` over the trained tokens of each.

    theta is all that is trained, weights or adapters; GVM's code takes the embeddings alone. Completions go through the model
    one after another, each in a forward and a backward pass of its own: as many operations as an update, in no more memory.
    0 without trained tokens.

    Raises:
      NotImplementedError: weights lie on several devices, over which one completion cannot be spread.
    """
    if policy.mesh is not None and policy.mesh.size > 1:
        raise NotImplementedError(ALONE.format(devices=policy.mesh.size))
    alone = dataclasses.replace(policy, mesh=None)

    def square_norms(params, lora, rollouts: Rollouts):
        P, G, T = rollouts.mask.shape
        trained = params if lora is None else lora

        def of_row(number):
            p, g = number // G, number % G
            row = Rollouts(mask=rollouts.token_mask[p, g][None, None], valid=jnp.ones((1, 1), bool),
                           tokens=rollouts.tokens[p, g][None, None], prompt_tokens=rollouts.prompt_tokens[p][None],
                           prompt_mask=rollouts.prompt_mask[p][None],
                           temperature=None if rollouts.temperature is None else rollouts.temperature[p][None])

            def score(tree):
                return masked.sum(alone.logprobs(*with_trained(params, lora, tree), row)[0], row.token_mask)

            return optax.tree.norm(jax.grad(score)(trained), squared=True)

        return jax.lax.map(of_row, jnp.arange(P * G)).reshape(P, G)

    return jax.jit(square_norms)
